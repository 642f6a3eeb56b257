package doctor

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/migrations"
)

// newestVersion is the version of the migrations that create knownTables.
const newestVersion = 37

// table is a table as the migrations create it. A test compares the list with a database.
type table struct {
	name     string
	settings []setting
}

// setting is a storage parameter of a table.
type setting struct{ name, value string }

func knownTables() []table {
	// updated are the settings of a table whose rows are updated often.
	updated := func(scale string) []setting {
		return []setting{
			{"fillfactor", "50"},
			{"autovacuum_vacuum_scale_factor", scale},
			{"autovacuum_vacuum_threshold", "1000"},
			{"autovacuum_vacuum_cost_delay", "0"},
		}
	}
	keepsPages := setting{"vacuum_truncate", "off"}
	return []table{
		{"buckets", append(updated("0.05"), keepsPages)},
		{"leases", append([]setting{{"fillfactor", "70"}}, append(updated("0.05")[1:], keepsPages)...)},
		{"reservations", []setting{{"fillfactor", "70"}, keepsPages}},
		{"fingerprint", nil},
		{"upstreams", updated("0")},
		{"rules", nil},
		{"rules_version", nil},
		{"compiled_rules", nil},
		{"compiled_keys", nil},
		{"refusals", nil},
	}
}

func names(tables []table) (all []string) {
	for _, t := range tables {
		all = append(all, t.name)
	}
	return all
}

// settingsOf returns the settings of a table.
func settingsOf(name string) []setting {
	for _, t := range knownTables() {
		if t.name == name {
			return t.settings
		}
	}
	return nil
}

var grantOf = regexp.MustCompile(`^GRANT (.+) ON (SCHEMA |FUNCTION )?(\S+) TO .+;$`)

// grant is a statement that grants a privilege to the role of programs.
type grant struct {
	statement  string
	kind       string // "SCHEMA ", "FUNCTION ", or empty: a table
	name       string
	privileges []string
}

func grantsFor(schema, role string) ([]grant, error) {
	text, err := migrations.Grants(migrations.Config{Schema: schema}, migrations.Roles{Application: role})
	if err != nil {
		return nil, err
	}
	var grants []grant
	for statement := range strings.Lines(text) {
		statement = strings.TrimSpace(statement)
		parts := grantOf.FindStringSubmatch(statement)
		if parts == nil {
			return nil, fmt.Errorf("the statement %q grants nothing", statement)
		}
		name := strings.Trim(strings.TrimPrefix(parts[3], pgx.Identifier{schema}.Sanitize()+"."), `"`)
		grants = append(grants, grant{statement, parts[2], name, strings.Split(parts[1], ", ")})
	}
	return grants, nil
}
