// Package docs_test runs the code that the README and the pages of docs show.
package docs_test

import (
	"testing"

	"go.uber.org/goleak"
)

// documents is why each test here is long.
const documents = "it compiles River, protobuf and YAML"

// No test, whatever it broke, leaves a goroutine behind.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/jackc/pgx/v5/pgconn/internal/bgreader.(*BGReader).bgRead"))
}
