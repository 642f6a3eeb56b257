package guard

import "github.com/pgratelimit/pgratelimit/ratelimit"

// Twice returns the limit of the first bucket that is in both requests, so that two nested guards take from it.
func Twice(limiter *ratelimit.Limiter, outer, inner []ratelimit.Request) (limit string, twice bool) {
	for _, o := range outer {
		for _, i := range inner {
			name := i.Limit().Name()
			if o.Limit().Name() != name || limiter.Mode(i) == ratelimit.Off {
				continue
			}
			taken, err := limiter.StoredKey(o)
			asked, errAsked := limiter.StoredKey(i)
			if err == nil && errAsked == nil && taken == asked {
				return name, true
			}
		}
	}
	return "", false
}
