//go:build unix

package server_test

import (
	"testing"

	"go.uber.org/goleak"
)

// No test, whatever it broke, leaves a goroutine behind.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/jackc/pgx/v5/pgconn/internal/bgreader.(*BGReader).bgRead"))
}
