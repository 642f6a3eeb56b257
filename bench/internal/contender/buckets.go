package contender

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const keyBytes = 8 // "k0000000"

// keys holds the keys in one string, because a million strings would keep the garbage collector busy. In a service the
// keys come with the requests.
type keys struct {
	text   string
	n      int
	skewed bool // a few keys make most calls
}

func makeKeys(n int) keys {
	var text strings.Builder
	text.Grow(n * keyBytes)
	for i := range n {
		fmt.Fprintf(&text, "k%0*d", keyBytes-1, i)
	}
	return keys{text: text.String(), n: n}
}

// any returns a random key.
func (k keys) any(c *load.Caller) string {
	if k.skewed {
		return k.at(int(c.Zipf(uint64(k.n))))
	}
	return k.at(c.Random.IntN(k.n))
}

func (k keys) at(i int) string { return k.text[i*keyBytes : (i+1)*keyBytes] }

const (
	roomyCapacity = 8e5 // for many keys
	hugeCapacity  = 3e9 // for one key
)

// policyFor returns a policy that admits every call on n keys during a run. Almost no tokens arrive meanwhile, so the
// missing tokens equal the calls.
func policyFor(n int) ratelimit.TokenBucket {
	if n == 1 {
		return ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: hugeCapacity}
	}
	return ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: roomyCapacity}
}

// buckets are the buckets of a limit. They begin full.
type buckets struct {
	bench  Bench
	limit  ratelimit.Limit
	keys   keys
	opened time.Time
}

// newBuckets returns buckets whose rows the caller inserts.
func newBuckets(b Bench, name string, n int) buckets {
	return buckets{b, ratelimit.Define(name, policyFor(n)), makeKeys(n), time.Now()}
}

// fill inserts the rows, each with that many tokens.
func (f buckets) fill(ctx context.Context, tokens float64) error {
	const insert = `
		INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity)
		SELECT $1, 'k' || lpad(i::text, $2, '0'), 0, $3, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint, $5::float8
		FROM generate_series(0, $4 - 1) AS i`
	_, err := f.bench.Database.Admin().Exec(ctx, insert, f.limit.Name(), keyBytes-1, tokens, f.keys.n, f.limit.Capacity())
	if err != nil {
		return fmt.Errorf("make %d buckets: %w", f.keys.n, err)
	}
	return nil
}

// fillUp inserts full rows.
func (f buckets) fillUp(ctx context.Context) error { return f.fill(ctx, f.limit.Capacity()) }

// any returns a request for one token of a random bucket.
func (f buckets) any(c *load.Caller) ratelimit.Request { return f.limit.For(f.keys.any(c)) }

// at returns a request for one token of the i-th bucket.
func (f buckets) at(i int) ratelimit.Request { return f.limit.For(f.keys.at(i)) }

// check returns an error unless the rows lack exactly the admitted tokens.
func (f buckets) check(ctx context.Context, admitted float64) error {
	const ask = `SELECT coalesce(sum($2 - value), 0) FROM ratelimit.buckets WHERE name = $1`
	var gone float64
	if err := f.bench.Database.Admin().QueryRow(ctx, ask, f.limit.Name(), f.limit.Capacity()).Scan(&gone); err != nil {
		return fmt.Errorf("count the tokens that are gone: %w", err)
	}
	return f.compare(admitted, gone)
}

// compare returns an error unless admitted - arrived <= gone <= admitted. arrived are the tokens since the buckets were
// created.
func (f buckets) compare(admitted, gone float64) error {
	const rounding = 1
	policy := policyFor(f.keys.n)
	arrived := float64(f.keys.n) * policy.Rate * float64(time.Since(f.opened)) / float64(policy.Period)
	if gone > admitted+rounding || gone < admitted-arrived-rounding {
		return fmt.Errorf("%s: %.0f tokens were admitted and %.0f are gone, while at most %.0f arrived", f.limit.Name(),
			admitted, gone, arrived)
	}
	return nil
}

// allowed returns an error unless the decision allows the call.
func allowed(d ratelimit.Decision, err error) error {
	if err != nil {
		return err
	}
	return d.Err()
}
