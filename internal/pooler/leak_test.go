package pooler_test

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/internal/leaktest"
)

// No test leaves a goroutine behind.
func TestMain(m *testing.M) { leaktest.Main(m) }
