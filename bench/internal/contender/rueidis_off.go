//go:build !rueidis

package contender

import "context"

// Rueidis is redis_rate's script through rueidis, in a build with the tag rueidis: the client takes a minute to compile.
type Rueidis struct {
	Keys int
}

// Open says that it is not there.
func (w Rueidis) Open(context.Context, Bench) (Runner, error) {
	return nil, unavailable("built without -tags rueidis")
}
