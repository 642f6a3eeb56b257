package contender

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const keyBytes = 8 // "k0000000"

// keys are the keys that callers choose from, in one piece of memory: a million strings of their own would keep
// the garbage collector busy, and be nobody's cost in a service, which gets its keys from requests.
type keys struct {
	text string
	n    int
}

func makeKeys(n int) keys {
	var text strings.Builder
	text.Grow(n * keyBytes)
	for i := range n {
		fmt.Fprintf(&text, "k%0*d", keyBytes-1, i)
	}
	return keys{text: text.String(), n: n}
}

// any returns a key of the caller's choice.
func (k keys) any(c *load.Caller) string { return k.at(c.Random.IntN(k.n)) }

func (k keys) at(i int) string { return k.text[i*keyBytes : (i+1)*keyBytes] }

// Policies. Next to nothing arrives while they are measured, so that what was taken can be counted in the end,
// and each holds nearly as much as its rate allows.
const (
	roomyCapacity = 8e5 // for many keys
	hugeCapacity  = 3e9 // for one key
)

func roomy() ratelimit.TokenBucket {
	return ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: roomyCapacity}
}

func huge() ratelimit.TokenBucket {
	return ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: hugeCapacity}
}

// policyFor returns a policy that admits everything on n keys for as long as a run takes.
func policyFor(n int) ratelimit.TokenBucket {
	if n == 1 {
		return huge()
	}
	return roomy()
}

// fill makes the buckets of a limit, each with tokens.
func fill(ctx context.Context, d *server.Database, name string, n int, tokens float64) error {
	const insert = `
		INSERT INTO ratelimit.buckets (name, key, shard, value, ts)
		SELECT $1, 'k' || lpad(i::text, $2, '0'), 0, $3, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
		FROM generate_series(0, $4 - 1) AS i`
	if _, err := d.Admin().Exec(ctx, insert, name, keyBytes-1, tokens, n); err != nil {
		return fmt.Errorf("make %d buckets: %w", n, err)
	}
	return nil
}

// taken returns what has been taken from the buckets of a limit that were full in the beginning.
func taken(ctx context.Context, d *server.Database, name string, capacity float64) (float64, error) {
	const ask = `SELECT coalesce(sum($2 - value), 0) FROM ratelimit.buckets WHERE name = $1`
	var sum float64
	if err := d.Admin().QueryRow(ctx, ask, name, capacity).Scan(&sum); err != nil {
		return 0, fmt.Errorf("count what was taken: %w", err)
	}
	return sum, nil
}
