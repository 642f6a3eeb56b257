//go:build !linux && !darwin

package server

import (
	"context"
	"fmt"
	"runtime"
)

func fetch(context.Context, int) (string, error) {
	return "", fmt.Errorf("servers are not started from packages on %s", runtime.GOOS)
}
