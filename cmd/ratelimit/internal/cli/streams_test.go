package cli_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/cli"
)

var errFull = errors.New("no space left on device")

// full is a disk that takes nothing.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, errFull }

// runFull runs the program with nowhere to write its answer to.
func (f *fixture) runFull(t *testing.T, args ...string) result {
	t.Helper()
	var errOut bytes.Buffer
	code := cli.Run(t.Context(), args, strings.NewReader(""), full{}, &errOut, func(name string) string {
		return map[string]string{"RATELIMIT_DATABASE_URL": f.url, "USER": "ana"}[name]
	})
	return result{code, "", errOut.String()}
}

func TestAnAnswerThatCannotBeWrittenIsAFailure(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, weekly("sends", "", 5))
	reads := []string{
		"help", "help take", "take --help", "version", "--version", "completion bash", "playground", "grants --application app", "doctor --all --max-transaction 1d",
		"rules list", "rules list -o yaml", "rules list -o json", "rules history", "check sends ada", "get sends ada", "top", "reservations list",
		"migrate status",
	}
	for _, args := range reads {
		r := f.runFull(t, split(args)...)
		require.Equal(t, 1, r.code, args)
		require.Equal(t, "ratelimit: the answer cannot be written: no space left on device\n", r.err, args)
	}
	rulesFile := file(t, "rules.yaml", "rules: [{limit: mail, rate: 1, period: 1s}]")
	for _, args := range []string{
		"take sends ada", "credit sends ada", "reset sends ada --yes", "pause sends ada --for 1h --reason x", "resume sends ada --reason x",
		"prune sends --yes", "migrate up", "rules apply --yes --reason x -o json -f " + rulesFile,
	} {
		r := f.runFull(t, split(args)...)
		require.Equal(t, 1, r.code, args)
		require.Contains(t, r.err, "ratelimit: what was asked for is done, and the answer cannot be written", args)
	}
	require.Equal(t, 1, f.runFull(t, "rules", "apply", "--yes", "--reason", "x", "-f", file(t, "next.yaml", "rules: [{limit: mail, rate: 2, period: 1s}]")).code)
	require.Contains(t, f.ok(t, "rules", "get", "mail"), "1 per second", "what could not be shown was not done")
}

func TestAnErrorLeavesNoDocument(t *testing.T) {
	t.Parallel()
	f := setup(t)
	rulesFile, bad := file(t, "rules.yaml", "rules: [{limit: mail, rate: 1, period: 1s}]"), file(t, "bad.yaml", "rules: [{limit: mail, rps: -1}]")
	for args, code := range map[string]int{
		"take mail ada": 2, "get mail ada --cost": 2, "rules get none": 6, "resume mail ada --reason x": 6, "reset mail ada": 2,
		"rules apply --yes --reason x -f " + bad: 2, "rules diff -f " + bad: 2, "rules apply --reason x -f " + rulesFile: 2,
		"rules apply --yes --reason x --from 2020-01-01T00:00:00Z -f " + rulesFile: 2, "reservations cancel x --yes": 6,
		"rules list --schema elsewhere": 1, "top --schema elsewhere": 1, "prune mail --yes": 2, "doctor --max-transaction x": 2,
	} {
		r := f.run(t, append(split(args), "-o", "json")...)
		require.Equal(t, code, r.code, "%s: %s", args, r.err)
		require.Empty(t, r.out, args)
		require.True(t, strings.HasPrefix(r.err, "ratelimit: "), "%s: %s", args, r.err)
	}
}

func TestAnInterruptEndsAWaitForInput(t *testing.T) {
	t.Parallel()
	rulesFile := file(t, "rules.yaml", "rules: [{limit: a, rate: 1, period: 1s}]")
	for _, args := range [][]string{{"simulate", "-f", rulesFile, "--by", "address"}, {"rules", "validate", "-f", "-"}} {
		ctx, cancel := context.WithCancel(t.Context())
		stdin, writer := io.Pipe()
		ended := make(chan int)
		var out, errOut bytes.Buffer
		go func() { ended <- cli.Run(ctx, args, stdin, &out, &errOut, func(string) string { return "" }) }()
		_, err := writer.Write([]byte("1")) // it reads
		require.NoError(t, err)
		cancel()
		require.Equal(t, 130, <-ended, errOut.String())
		require.NoError(t, writer.Close())
	}
}
