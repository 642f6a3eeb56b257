package bucket_test

import "github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"

const (
	opening = buckettest.Opening
	minute  = buckettest.Minute
	day     = buckettest.Day
	century = buckettest.Century
)
