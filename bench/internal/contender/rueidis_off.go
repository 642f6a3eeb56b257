//go:build !rueidis

package contender

import "context"

// Rueidis is redis_rate's script through rueidis. It needs the build tag rueidis, because the client takes a minute to
// compile.
type Rueidis struct {
	Keys int
}

// Open returns ErrUnavailable.
func (w Rueidis) Open(context.Context, Bench) (*Runner, error) {
	return nil, unavailable("built without -tags rueidis")
}
