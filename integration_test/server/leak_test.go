//go:build unix

package server_test

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/internal/leaktest"
)

// No test, whatever it broke, leaves a goroutine behind.
func TestMain(m *testing.M) { leaktest.Main(m) }
