package sqlapi_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/client"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// takers are programs that take 80 times, each time in a transaction that also writes a row, and roll back each fifth
// of them.
var takers = map[string]string{
	"python": `
import os, psycopg2
db = psycopg2.connect(os.environ["DATABASE_URL"])
for n in range(80):
    with db.cursor() as cursor:
        cursor.execute("SELECT allowed FROM ratelimit.take(%s, %s)", ("m", "ana"))
        if cursor.fetchone()[0]:
            cursor.execute("INSERT INTO written VALUES (%s)", ("python",))
    db.rollback() if n % 5 == 0 else db.commit()
`,
	"js": `
const { Client } = require("pg");
(async () => {
  const db = new Client({ connectionString: process.env.DATABASE_URL });
  await db.connect();
  for (let n = 0; n < 80; n++) {
    await db.query("BEGIN ISOLATION LEVEL REPEATABLE READ");
    try {
      const { rows } = await db.query("SELECT allowed FROM ratelimit.take($1, $2)", ["m", "ana"]);
      if (rows[0].allowed) await db.query("INSERT INTO written VALUES ($1)", ["js"]);
      await db.query(n % 5 === 0 ? "ROLLBACK" : "COMMIT");
    } catch (error) {
      if (error.code !== "40001") throw error;
      await db.query("ROLLBACK");
    }
  }
  await db.end();
})();
`,
	"ruby": `
require "pg"
db = PG.connect(ENV["DATABASE_URL"])
80.times do |n|
  db.exec("BEGIN")
  allowed = db.exec_params("SELECT allowed FROM ratelimit.take($1, $2)", ["m", "ana"])[0]["allowed"]
  db.exec_params("INSERT INTO written VALUES ($1)", ["ruby"]) if allowed == "t"
  db.exec(n % 5 == 0 ? "ROLLBACK" : "COMMIT")
end
`,
}

// takeInGo does the same in Go.
func takeInGo(ctx context.Context, pool *pgxpool.Pool) error {
	set, err := rules.NewSet(pool, rules.Config{})
	if err == nil {
		err = set.Load(ctx)
	}
	if err != nil {
		return err
	}
	limit, _ := set.Limit("m")
	limiter, err := ratelimit.New(pool, ratelimit.Config{Policies: set, Timeout: time.Minute, MaxAttempts: 1000})
	undone := errors.New("undone")
	for n := 0; n < 80 && err == nil; n++ {
		err = limiter.InTx(ctx, func(tx pgx.Tx) error {
			d, err := limiter.WithTx(tx).Take(ctx, limit.For("ana"))
			if err == nil && d.Allowed {
				_, err = tx.Exec(ctx, `INSERT INTO written VALUES ('go')`)
			}
			if n%5 == 0 {
				return errors.Join(err, undone)
			}
			return err
		})
		if errors.Is(err, undone) {
			err = nil
		}
	}
	return err
}

// TestClientsOnOneBucket promises that programs in Go, Python, Node and Ruby, and psql, that take from one bucket at
// once are allowed as often as it has tokens: each row that was written took one.
func TestClientsOnOneBucket(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts programs in other languages")
	const tokens = 200
	pool := postgrestest.New(t, func(c *pgxpool.Config) { c.MaxConns = 3 })
	store(t, pool, map[string]string{"m": fmt.Sprintf(`{"kind": "fixed window", "rate": %d, "period": "8760h"}`, tokens)})
	_, err := pool.Exec(t.Context(), `CREATE TABLE written (by text)`)
	require.NoError(t, err)
	url := pool.Config().ConnString()
	missing := map[string]error{}
	group, ctx := errgroup.WithContext(t.Context())
	run := func(command *exec.Cmd) {
		group.Go(func() error {
			out, err := command.CombinedOutput()
			if err != nil {
				return fmt.Errorf("%s: %w: %s", command.Path, err, out)
			}
			return nil
		})
	}
	for _, language := range client.Languages() {
		in, err := client.Find(t, language)
		if missing[language] = err; err == nil {
			path := filepath.Join(t.TempDir(), "program")
			require.NoError(t, os.WriteFile(path, []byte(takers[language]), 0o600))
			run(in.Command(ctx, path, "DATABASE_URL="+url))
		}
	}
	psql, err := exec.LookPath("psql")
	if missing["psql"] = err; err == nil {
		const once = "BEGIN; INSERT INTO written SELECT 'psql' FROM ratelimit.take('m', 'ana') WHERE allowed; %s;\n"
		script := strings.Repeat(fmt.Sprintf(once, "ROLLBACK")+strings.Repeat(fmt.Sprintf(once, "COMMIT"), 4), 16)
		command := exec.CommandContext(ctx, psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", url)
		command.Stdin = strings.NewReader(script)
		run(command)
	}
	group.Go(func() error { return takeInGo(ctx, pool) })
	require.NoError(t, group.Wait())

	var written int
	var left float64
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM written), remaining FROM ratelimit.check('m', 'ana')`).Scan(&written, &left))
	require.Equal(t, float64(tokens), float64(written)+left)
	for language, err := range missing {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			if err != nil {
				t.Skip(err)
			}
		})
	}
}
