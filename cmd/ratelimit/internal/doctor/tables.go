package doctor

import (
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/migrations"
)

// tables are what the migrations that this program knows make of a database.
type tables struct {
	version  int64 // the newest
	settings map[string][]setting
	indexes  map[string][]index // those that have to be there
}

// setting is a storage parameter of a table.
type setting struct{ name, value string }

var (
	comment    = regexp.MustCompile(`--[^\n]*`)
	tableWith  = regexp.MustCompile(`CREATE TABLE ` + migrations.DefaultSchema + `\.(\w+) \([^;]*\) WITH \(([^;]*)\);`)
	tableMade  = regexp.MustCompile(`CREATE TABLE ` + migrations.DefaultSchema + `\.(\w+) \(([^;]*?)\n\)`)
	keyOfTable = regexp.MustCompile(`\n\s*PRIMARY KEY \(([^)]*)\)`)
	keyColumn  = regexp.MustCompile(`\n\s*(\w+) [^,]* PRIMARY KEY`)
	indexMade  = regexp.MustCompile(`CREATE INDEX \w+ ON ` + migrations.DefaultSchema + `\.(\w+) \(([^)]*)\)[^;]*;`)
	grantOf    = regexp.MustCompile(`^GRANT (.+) ON (SCHEMA )?(\S+) TO .+;$`)
	fileNumber = regexp.MustCompile(`^(\d+)_`)
)

// knownTables reads the migrations of this program.
func knownTables() (*tables, error) {
	known := &tables{settings: make(map[string][]setting), indexes: make(map[string][]index)}
	names, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if number := fileNumber.FindStringSubmatch(name); number != nil {
			version, err := strconv.ParseInt(number[1], 10, 64)
			if err != nil {
				return nil, err
			}
			known.version = max(known.version, version)
		}
		text, err := migrations.FS.ReadFile(name)
		if err != nil {
			return nil, err
		}
		up, _, _ := strings.Cut(string(text), "+goose Down")
		known.add(comment.ReplaceAllString(up, ""))
	}
	return known, nil
}

// add adds what the statements of a migration make.
func (t *tables) add(statements string) {
	for _, made := range tableWith.FindAllStringSubmatch(statements, -1) {
		t.settings[made[1]] = settingsOf(strings.Split(made[2], ","))
	}
	for _, made := range tableMade.FindAllStringSubmatch(statements, -1) {
		for _, key := range []*regexp.Regexp{keyOfTable, keyColumn} {
			if columns := key.FindStringSubmatch(made[2]); columns != nil {
				t.indexes[made[1]] = append(t.indexes[made[1]], index{
					columns: columns[1], unique: true,
					statement: fmt.Sprintf("ALTER TABLE %s.%s ADD PRIMARY KEY (%s);", migrations.DefaultSchema, made[1], columns[1]),
				})
				break
			}
		}
	}
	for _, made := range indexMade.FindAllStringSubmatch(statements, -1) {
		t.indexes[made[1]] = append(t.indexes[made[1]], index{columns: made[2], statement: made[0]})
	}
}

// inSchema returns a statement for the default schema as one for that of the examination.
func (e *examination) inSchema(statement string) string {
	return strings.ReplaceAll(statement, migrations.DefaultSchema+".", pgx.Identifier{e.config.Schema}.Sanitize()+".")
}

// settingsOf returns parameters that are written as name = value, or as Postgres lists them.
func settingsOf(texts []string) []setting {
	settings := make([]setting, 0, len(texts))
	for _, text := range texts {
		name, value, _ := strings.Cut(text, "=")
		settings = append(settings, setting{strings.TrimSpace(name), strings.TrimSpace(value)})
	}
	return settings
}

// grant is a statement that lets the role of programs do something.
type grant struct {
	statement  string
	table      string // empty: the schema
	privileges []string
}

// grantsFor returns what a role has to be granted.
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
		g := grant{statement: statement, privileges: strings.Split(parts[1], ", ")}
		if parts[2] == "" {
			g.table = strings.Trim(strings.TrimPrefix(parts[3], pgx.Identifier{schema}.Sanitize()+"."), `"`)
		}
		grants = append(grants, g)
	}
	return grants, nil
}

// tableNames returns the tables that programs need.
func tableNames(grants []grant) (names []string) {
	for _, g := range grants {
		if g.table != "" && !slices.Contains(names, g.table) {
			names = append(names, g.table)
		}
	}
	return names
}
