package postgrestest

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestStart(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		env      environment
		canceled bool
		says     string
	}{
		"StopsWhenTheContextDoes":        {environment{}, true, "context canceled"},
		"TriesNothingElseWhenAURLIsSet":  {environment{url: "postgres://user:secret@127.0.0.1:1/db", urlVariable: "DATABASE_URL"}, false, "DATABASE_URL: "},
		"TriesOnlyTheProgramsThatAreSet": {environment{binDir: t.TempDir()}, false, "RATELIMIT_POSTGRES_BINDIR: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if test.canceled {
				cancel()
			}
			_, err := start(ctx, Options{}, test.env)
			require.ErrorContains(t, err, test.says)
			require.NotErrorIs(t, err, ErrNoServer, "what was asked for and not found is not to be skipped")
			require.NotContains(t, err.Error(), "secret")
		})
	}
}

func TestNoServerSaysWhatWasTriedAndHowToGetOne(t *testing.T) {
	t.Parallel()
	for _, env := range []environment{{}, {url: "postgres://a", urlVariable: "DATABASE_URL"}} {
		err := noServer(env, errors.New("no programs here"))
		require.ErrorIs(t, err, ErrNoServer)
		for _, part := range []string{"DATABASE_URL is", "no programs here", "apt-get install", "docker run"} {
			require.ErrorContains(t, err, part)
		}
	}
}

func TestChosenSettings(t *testing.T) {
	t.Parallel()
	chosen, err := chosenSettings("jit=on, default_transaction_isolation = repeatable read,search_path=it's")
	require.NoError(t, err)
	require.Equal(t, map[string]string{"jit": "on", "default_transaction_isolation": "repeatable read", "search_path": "it's"}, chosen)
	require.Equal(t, []string{
		`ALTER DATABASE "a" SET "default_transaction_isolation" = 'repeatable read'`,
		`ALTER DATABASE "a" SET "jit" = 'on'`,
		`ALTER DATABASE "a" SET "search_path" = 'it''s'`,
	}, alterDatabase("a", chosen))
	none, err := chosenSettings("")
	require.NoError(t, err)
	require.Empty(t, alterDatabase("a", none))
	for _, text := range []string{"jit", "jit=", "=on"} {
		_, err := chosenSettings(text)
		require.ErrorContains(t, err, "RATELIMIT_SETTINGS="+text)
	}
}
