package integration_test

import (
	"os"
	"os/exec"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The environment of TestClient.
const (
	clientURL     = "RATELIMIT_TEST_CLIENT_URL"     // makes it the client to kill
	clientCall    = "RATELIMIT_TEST_CLIENT_CALL"    // what it waits in
	clientWatched = "RATELIMIT_TEST_CLIENT_WATCHED" // the client_connection_check_interval of its session
)

// TestClient is not a test but the process that the next one starts and kills.
func TestClient(t *testing.T) { //nolint:paralleltest // alone in its process
	url := os.Getenv(clientURL)
	if url == "" {
		t.Skip("the process of TestAClientThatIsKilledWhileItWaits")
	}
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	config.ConnConfig.RuntimeParams["client_connection_check_interval"] = os.Getenv(clientWatched)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	s := &stand{bundle: &bundle{pool: pool, schema: "ratelimit"}}
	s.limiter = s.with(t, ratelimit.Config{})
	switch os.Getenv(clientCall) {
	case "InTx":
		err = s.limiter.InTx(t.Context(), func(tx pgx.Tx) error { return s.send(t.Context(), tx, "ada") })
	case "Take":
		_, err = s.limiter.Take(t.Context(), calls.For("ada"))
	}
	t.Fatalf("was not killed: %v", err)
}

// A client that is killed leaves its backend waiting. What it has sent is carried out once the lock is free,
// unless a COMMIT is needed that nobody sends, or the server looks after its clients meanwhile.
func TestAClientThatIsKilledWhileItWaits(t *testing.T) {
	t.Parallel()
	const unwatched, watched = "0", "50ms"
	for _, test := range []struct {
		name, call, check string
		takes             int // at most
	}{
		{name: "InTxTakesNothing", call: "InTx", check: unwatched},
		{name: "InTxTakesNothingAndLeavesWhenWatched", call: "InTx", check: watched},
		{name: "TakeTakesOnceAtMost", call: "Take", check: unwatched, takes: 1},
		{name: "TakeTakesNothingAndLeavesWhenWatched", call: "Take", check: watched},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t)
			require.NoError(t, s.takeOutside(t.Context(), "ada"))
			release := s.hold(t)
			kill := s.startClient(t, test.call, test.check)
			backend := s.awaitWaiter(t)
			kill()
			if test.check == watched {
				s.awaitEnd(t, backend) // while the row is still locked
			}
			release()
			s.awaitEnd(t, backend)
			require.GreaterOrEqual(t, s.taken(t), 1)
			require.LessOrEqual(t, s.taken(t), 1+test.takes)
			require.Zero(t, s.messages(t))
			s.requireHealthy(t)
		})
	}
}

// startClient starts TestClient in a process of its own, and returns what kills it.
func (s *stand) startClient(t *testing.T, call, check string) (kill func()) {
	t.Helper()
	client := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestClient$")
	client.Env = append(os.Environ(), clientURL+"="+s.pool.Config().ConnString(), clientCall+"="+call, clientWatched+"="+check)
	require.NoError(t, client.Start())
	return func() {
		require.NoError(t, client.Process.Kill())
		require.ErrorContains(t, client.Wait(), "killed")
	}
}
