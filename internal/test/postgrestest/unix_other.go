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
