package contender

import "time"

// What the tests of this package see beside its exported names.
var (
	ParseThroughput = parseThroughput
	ParseLog        = parseLog
	RedisScript     = redisScript
	RedisLimit      = redisLimit
)

// CompareAfter compares the tokens that are gone from n buckets that were made a time ago.
func CompareAfter(age time.Duration, n int, admitted, gone float64) error {
	of := newBuckets(Bench{}, "limit", n)
	of.opened = of.opened.Add(-age)
	return of.compare(admitted, gone)
}
