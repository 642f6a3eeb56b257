package postgrestest

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEnvironment(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		variables map[string]string
		want      environment
	}{
		"IsEmpty":           {nil, environment{}},
		"TakesDATABASE_URL": {map[string]string{"DATABASE_URL": "postgres://b"}, environment{urlVariable: "DATABASE_URL", url: "postgres://b"}},
		"PrefersRATELIMIT_DATABASE_URL": {
			map[string]string{"RATELIMIT_DATABASE_URL": "postgres://a", "DATABASE_URL": "postgres://b"},
			environment{urlVariable: "RATELIMIT_DATABASE_URL", url: "postgres://a"},
		},
		"TakesPrograms":       {map[string]string{"RATELIMIT_POSTGRES_BINDIR": "/bin"}, environment{binDir: "/bin"}},
		"TakesCitusForAll":    {map[string]string{citusBinDir: "/citus", citusForAll: "1"}, environment{citusBinDir: "/citus"}},
		"LeavesCitusForCitus": {map[string]string{citusBinDir: "/citus"}, environment{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, test.want, environmentFrom(func(name string) string { return test.variables[name] }))
		})
	}
}

func TestStart(t *testing.T) {
	t.Parallel()

	t.Run("SaysWhatWasTriedAndHowToGetOne", func(t *testing.T) {
		t.Parallel()
		err := noServer(environment{}, errors.New("no programs here"))
		require.ErrorIs(t, err, ErrNoServer)
		for _, part := range []string{
			"RATELIMIT_DATABASE_URL nor DATABASE_URL", "no programs here", "apt-get install", "brew install", "docker run",
		} {
			require.ErrorContains(t, err, part)
		}
	})

	t.Run("SaysThatAServerNamedByURLIsPassedOver", func(t *testing.T) {
		t.Parallel()
		err := noServer(environment{url: "postgres://a", urlVariable: "DATABASE_URL"}, errors.New("no programs here"))
		require.ErrorContains(t, err, "DATABASE_URL is passed over")
	})

	t.Run("StopsWhenTheContextDoes", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := start(ctx, Options{}, environment{})
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, ErrNoServer)
	})

	t.Run("TriesNothingElseWhenAURLIsSet", func(t *testing.T) {
		t.Parallel()
		env := environment{url: "postgres://user:secret@127.0.0.1:1/db", urlVariable: "DATABASE_URL"}
		_, err := start(t.Context(), Options{}, env)
		require.ErrorContains(t, err, "DATABASE_URL: ")
		require.NotErrorIs(t, err, ErrNoServer, "what was asked for and not found is not to be skipped")
		require.NotContains(t, err.Error(), "secret")
	})

	t.Run("TriesOnlyTheProgramsThatAreNamed", func(t *testing.T) {
		t.Parallel()
		_, err := start(t.Context(), Options{}, environment{binDir: t.TempDir()})
		require.ErrorContains(t, err, "RATELIMIT_POSTGRES_BINDIR: ")
		require.NotErrorIs(t, err, ErrNoServer)
	})
}

func TestConfiguration(t *testing.T) {
	t.Parallel()
	list := settingList(map[string]string{"fsync": "on", "search_path": "a"}, map[string]string{"search_path": "it's"})
	text := configuration(list)
	require.Contains(t, text, "fsync = 'on'\n")
	require.Contains(t, text, "search_path = 'it''s'\n")
	require.Contains(t, text, "max_connections = '200'\n")
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
