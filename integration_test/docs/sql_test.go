package docs_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/client"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

var block = regexp.MustCompile("(?s)```(sql|python|js|ruby)\n(.*?)```")

// TestSQLPage runs the statements of docs/sql.md in order, in one session of psql, and its programs in the languages
// that are installed here with their drivers. Each program is refused once.
func TestSQLPage(t *testing.T) {
	t.Parallel()
	psql, err := exec.LookPath("psql")
	if err != nil {
		t.Skip("psql is not installed")
	}
	page, err := os.ReadFile("../../docs/sql.md")
	require.NoError(t, err)
	pool := postgrestest.New(t)
	url := pool.Config().ConnString()
	var script strings.Builder
	programs := map[string]string{}
	for _, found := range block.FindAllStringSubmatch(string(page), -1) {
		if found[1] == "sql" {
			script.WriteString(found[2])
		} else {
			programs[found[1]] = found[2]
		}
	}
	run := exec.Command(psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", url)
	run.Stdin = strings.NewReader(script.String())
	out, err := run.CombinedOutput()
	require.NoError(t, err, "%s", out)
	var left float64
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT remaining FROM ratelimit.check('messages', 'ana')`).Scan(&left))
	require.Less(t, left, 1.0, "require has taken one token, and take two")

	_, err = pool.Exec(t.Context(), `DROP TRIGGER limit_messages ON messages; INSERT INTO ratelimit.rules (version, of, name, says, author, reason)
		VALUES (2, 'rule', 'messages', '{"kind": "fixed window", "rate": 3, "period": "8760h", "on_change": "reset"}', 'ana', 'no token comes back meanwhile')`)
	require.NoError(t, err)
	require.Len(t, programs, 3)
	for language, program := range programs {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			in, err := client.Find(t, language)
			if err != nil {
				t.Skip(err)
			}
			path := filepath.Join(t.TempDir(), "program")
			require.NoError(t, os.WriteFile(path, []byte(program), 0o600))
			said := ""
			for range 4 {
				out, err := in.Command(t.Context(), path, "DATABASE_URL="+url).CombinedOutput()
				require.NoError(t, err, "%s", out)
				said += string(out)
			}
			require.Regexp(t, `^try again in [0-9.]+ s\n$`, said, "the rate is 3")
			author := map[string]string{"python": "python", "js": "node", "ruby": "ruby"}[language]
			var rows int
			require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM messages WHERE author = $1`, author).Scan(&rows))
			require.Equal(t, 3, rows)
			var left float64
			require.NoError(t, pool.QueryRow(t.Context(), `SELECT remaining FROM ratelimit.check('messages', $1)`, author).Scan(&left))
			require.Zero(t, left)
		})
	}
}
