//go:build unix

package server_test

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/internal/leaktest"
)

// No test leaves a goroutine behind, also after faults.
func TestMain(m *testing.M) { leaktest.Main(m) }
