package ratelimit

import "context"

// Observers returns an Observer that tells each of observers, in this order; nil ones are left out. It is
// nil when none is left, and so nobody.
func Observers(observers ...Observer) Observer {
	var told several
	for _, o := range observers {
		if !isNil(o) {
			told = append(told, o)
		}
	}
	switch len(told) {
	case 0:
		return nil
	case 1:
		return told[0]
	}
	return told
}

type several []Observer

func (s several) Observe(ctx context.Context, event Event) {
	for _, o := range s {
		o.Observe(ctx, event)
	}
}
