package cli_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// findings are what doctor prints.
type findings struct {
	Findings []struct{ Check, Level, Says, Do string }
}

// wrong returns the checks that found something to be done.
func (f findings) wrong() (checks []string) {
	for _, finding := range f.Findings {
		if finding.Level == "warning" || finding.Level == "fault" {
			checks = append(checks, finding.Check)
		}
	}
	return checks
}

func TestDoctor(t *testing.T) {
	t.Parallel()

	t.Run("SaysThatAllIsWell", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		r := f.run(t, "doctor", "--max-transaction", "1d") // other tests use the server, too
		require.Equal(t, 0, r.code, r.out)
		require.Regexp(t, `^all is well; --all shows the answers of the checks: \w+(, \w+){17}\n$`, r.out+r.err)
		require.Contains(t, f.ok(t, "doctor", "--all", "--max-transaction", "1d"), "ok      migrations: ")
		v := read[findings](t, f, 0, "doctor", "--max-transaction", "1d")
		require.NotEmpty(t, v.Findings)
		require.Empty(t, v.wrong())
	})

	t.Run("SaysWhatIsWrongAndWhatToDo", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		ctx := t.Context()
		_, err := f.pool.Exec(ctx, "ALTER TABLE ratelimit.buckets SET (fillfactor = 100)")
		require.NoError(t, err)
		_, err = f.limiter(t, ratelimit.Config{HashKey: []byte("0123456789abcdef")}).Take(ctx, ratelimit.Define("sends", ratelimit.PerWeek(1)).For("ada"))
		require.NoError(t, err)
		r := f.run(t, "doctor", "--max-transaction", "1d", "--hash-key-file", file(t, "secret", "fedcba9876543210"))
		require.Equal(t, 5, r.code)
		require.Contains(t, r.out, "storage: ")
		require.Contains(t, r.out, "hashkey: ")
		require.Contains(t, r.out, "\n        ALTER TABLE ", "what to do stands below")
		require.NotContains(t, r.out, "fedcba9876543210")
		require.NotContains(t, r.out, "ok      ")
		v := read[findings](t, f, 5, "doctor", "--max-transaction", "1d", "--hash-key-file", file(t, "secret", "0123456789abcdef\n"))
		require.Equal(t, []string{"storage"}, v.wrong())
		require.Contains(t, read[findings](t, f, 5, "doctor", "--max-transaction", "1d", "--role", "nobody_of_that_name").wrong(), "role")
	})

	t.Run("WithoutTablesIsAFault", func(t *testing.T) {
		t.Parallel()
		f := on(t, postgrestest.NewEmptyDatabase(t))
		require.Contains(t, read[findings](t, f, 5, "doctor").wrong(), "migrations")
	})

	t.Run("WithoutAServerIsAFault", func(t *testing.T) {
		t.Parallel()
		r := run(t.Context(), []string{"RATELIMIT_DATABASE_URL=postgres://ana:s3cr3t-word@127.0.0.1:1/limits"}, "", "doctor")
		require.Equal(t, 5, r.code)
		require.Contains(t, r.out, "connection: There is no connection to 127.0.0.1, port 1: ")
		require.NotContains(t, r.out+r.err, "s3cr3t-word")
	})
}
