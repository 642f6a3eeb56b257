// Package ratelimit is what a caller names.
package ratelimit

// Limiter decides. Nobody makes
// one that is closed.
type Limiter struct {
	pool   any
	Public int
}

// Config has `what is` in code only.
type Config struct{}

const (
	One   = 1
	other = 2
)

var First, second int

//nolint:unused // this is told to a linter alone
func New() *Limiter { return nil }

func (l *Limiter) Take(limits []string) bool {
	if l.pool == nil {
		return false
	}
	return len(limits) > One
}

func (l Limiter) close() {}

func (c config) Public() {}

type config struct{}
