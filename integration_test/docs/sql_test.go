package docs_test

import (
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

var sqlBlock = regexp.MustCompile("(?s)```sql\n(.*?)```")

// TestSQLPage runs the statements of docs/sql.md, in order, in one session.
func TestSQLPage(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/sql.md")
	require.NoError(t, err)
	conn, err := postgrestest.New(t).Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	blocks := sqlBlock.FindAllStringSubmatch(string(page), -1)
	require.NotEmpty(t, blocks)
	for _, block := range blocks {
		_, err := conn.Conn().PgConn().Exec(t.Context(), block[1]).ReadAll()
		require.NoError(t, err, block[1])
	}
	var left float64
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT remaining FROM ratelimit.check('messages', 'ana')`).Scan(&left))
	require.Less(t, left, 1.0, "require has taken one token, and take two")
}
