package cli_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestDoctor promises the exit codes of doctor, that it shows statements that mend a finding, and that it does not print the secret.
func TestDoctor(t *testing.T) {
	t.Parallel()
	f := setup(t)
	r := f.run(t, "doctor", "--max-transaction", "1d") // other tests use the server, too
	require.Equal(t, 0, r.code, r.out)
	require.Regexp(t, `^all is well; --all shows the answers of the checks: \w+(, \w+){17}\n$`, r.out+r.err)
	require.Contains(t, f.ok(t, "doctor", "--all", "--max-transaction", "1d"), "ok      migrations: ")

	_, err := f.pool.Exec(t.Context(), "ALTER TABLE ratelimit.buckets SET (fillfactor = 100)")
	require.NoError(t, err)
	_, err = f.limiter(t, ratelimit.Config{HashKey: []byte("0123456789abcdef")}).Take(t.Context(), ratelimit.Define("sends", ratelimit.PerWeek(1)).For("ada"))
	require.NoError(t, err)
	r = f.run(t, "doctor", "--max-transaction", "1d", "--hash-key-file", file(t, "secret", "fedcba9876543210"), "--role", "nobody_of_that_name")
	require.Equal(t, 5, r.code)
	for _, text := range []string{"storage: ", "hashkey: ", "role: ", "\n        ALTER TABLE "} {
		require.Contains(t, r.out, text)
	}
	require.NotContains(t, r.out, "fedcba9876543210")
	require.NotContains(t, r.out, "ok      ")
}
