// Package docs_test runs the code that the README and the pages of docs show.
package docs_test

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/internal/leaktest"
)

// documents is why each test here is long.
const documents = "it compiles River, protobuf and YAML"

// No test leaves a goroutine behind, also after faults.
func TestMain(m *testing.M) { leaktest.Main(m) }
