//go:build !unix

package postgrestest

import (
	"context"
	"errors"
	"testing"
)

var errNotUnix = errors.New("servers are started on Unix only")

func startLocal(context.Context, Options, environment) (*Server, error) { return nil, errNotUnix }

func startCluster(context.Context, string, Options) (*Server, error) { return nil, errNotUnix }

func checkBinDir(string) error { return errNotUnix }

// PoolMode is when PgBouncer gives a connection of the server to another client.
type PoolMode string

// The modes, as pool_mode has them.
const (
	SessionPool     PoolMode = "session"
	TransactionPool PoolMode = "transaction"
	TrackingPool    PoolMode = "tracking"
	StatementPool   PoolMode = "statement"
)

// StartPgBouncer skips the test: programs are started on Unix only.
func StartPgBouncer(t testing.TB, _ string, _ PoolMode) string {
	t.Helper()
	t.Skip("PgBouncer is started on Unix only")
	return ""
}

// HasTrackingPool reports false.
func HasTrackingPool(t testing.TB) bool {
	t.Helper()
	return false
}
