package contender

// What the tests of this package see beside its exported names.
var (
	ParseThroughput = parseThroughput
	ParseLog        = parseLog
	Exact           = exact
	RedisScript     = redisScript
	RedisLimit      = redisLimit
)
