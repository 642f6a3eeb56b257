package postgrestest

import (
	"context"
	"time"
)

// pause waits for a moment before something is looked at again. It reports false when ctx ends first.
func pause(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(20 * time.Millisecond):
		return true
	}
}
