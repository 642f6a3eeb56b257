package postgrestest

import (
	"crypto/rand"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// defaultSettings make a disposable server fast. They weaken durability only for a power loss, not for a crash of the
// server.
func defaultSettings() map[string]string {
	return map[string]string{
		"fsync":              "off",
		"full_page_writes":   "off",
		"autovacuum_naptime": "10min", // or processes look at the database of each test
		"max_connections":    "400",   // several test binaries can share it
		"max_wal_size":       "256MB",
		"log_line_prefix":    "%m [%p] %d ",
		// Or each session loads it at its first call of a function.
		"shared_preload_libraries": "plpgsql",
	}
}

// chosenVariable names settings for all databases and servers that tests are given, as "jit=on,jit_above_cost=0".
const chosenVariable = "RATELIMIT_SETTINGS"

// chosenSettings reads the value of chosenVariable. No name and no value can hold a comma.
func chosenSettings(text string) (map[string]string, error) {
	chosen := map[string]string{}
	for _, item := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' }) {
		name, value, found := strings.Cut(item, "=")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		if !found || name == "" || value == "" {
			return nil, fmt.Errorf("%s=%s: want settings as in jit=on,jit_above_cost=0", chosenVariable, text)
		}
		chosen[name] = value
	}
	return chosen, nil
}

// alterDatabase returns the statements that set these for sessions of a database.
func alterDatabase(name string, settings map[string]string) []string {
	var statements []string
	for _, setting := range slices.Sorted(maps.Keys(settings)) {
		statements = append(statements, fmt.Sprintf("ALTER DATABASE %s SET %s = '%s'",
			pgx.Identifier{name}.Sanitize(), pgx.Identifier{setting}.Sanitize(),
			strings.ReplaceAll(settings[setting], "'", "''")))
	}
	return statements
}

// configuration returns lines of postgresql.conf: the default settings with each layer on top of the one before, by
// name.
func configuration(layers ...map[string]string) string {
	settings := defaultSettings()
	for _, layer := range layers {
		maps.Copy(settings, layer)
	}
	var lines strings.Builder
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&lines, "%s = '%s'\n", name, strings.ReplaceAll(settings[name], "'", "''"))
	}
	return lines.String()
}

// randomName returns 16 random letters and digits.
func randomName() string { return strings.ToLower(rand.Text()[:16]) }

// lastLines returns as much of a log as an error message is good for.
func lastLines(text string) string {
	const n = 30
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
