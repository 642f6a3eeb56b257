package cli_test

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/cli"
)

// FuzzRun gives the program any arguments, a line each, and any input. Its context has ended, so it connects to no database and
// starts no server. It exits with a documented code, and prints the fault on standard error if that code alone does not say it.
func FuzzRun(f *testing.F) {
	for _, line := range []string{
		"", "version", "help policies", "rules validate -f -", "take sendMessage ada --policy=10 --cost 3 --database-url postgres://127.0.0.1:1/x",
		"get a --policy 5", "get a --policy=1e400",
		"get a --policy= -o json", "simulate -f - --format json", "pause a b --for 1h --until 2030-01-01T00:00:00Z",
		"grants --application app --schema Bad", "reservations cancel x --yes", "prune --refusals-older-than NaNd --yes", "migrate down --yes --schema x",
		"doctor --hash-key-file /nowhere", "top --by owed --most 5", "completion bash", "-h", "--", "take \x00 \xff", "leases release L1AAAA --yes",
	} {
		f.Add(strings.ReplaceAll(line, " ", "\n"), "rules: [{limit: a, rate: 1, period: 1s}]")
	}
	codes := []int{0, 1, 2, 3, 4, 5, 6, 130}
	f.Fuzz(func(t *testing.T, line, input string) {
		args := strings.Split(line, "\n")
		if slices.Contains(args, "playground") { // which listens
			return
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		var out, errOut bytes.Buffer
		code := cli.Run(ctx, args, strings.NewReader(input), &out, &errOut, func(string) string { return "" })
		require.Contains(t, codes, code)
		if code == 1 || code == 2 || code == 130 {
			require.True(t, strings.HasPrefix(errOut.String(), "ratelimit: "), "%q", errOut.String())
		}
		require.NotContains(t, errOut.String(), "goroutine ")
		require.False(t, strings.ContainsAny(errOut.String(), "\x00\x1b"), "%q", errOut.String())
	})
}
