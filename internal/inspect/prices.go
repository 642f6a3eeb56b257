package inspect

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Upstream is what all processes know of the upstream of an adaptive limit and a key.
type Upstream struct {
	// Share is the share of the contract that it gives, by the policy with the lowest Floor.
	Share float64
	// PausedUntil is the end of the pause that it requested. Zero: it never did.
	PausedUntil time.Time
	// Seen is when it was last reported of.
	Seen time.Time
}

// Within returns the share that a policy gives which has a Floor.
func (u Upstream) Within(floor float64) float64 { return min(max(u.Share, floor), 1) }

// Upstream returns the stored state of the upstream of a limit and a key. found is false if there is none; then the contract is in
// effect.
func (r *Reader) Upstream(ctx context.Context, limit, key string) (u Upstream, found bool, err error) {
	if err := checkBucket(limit, key); err != nil {
		return u, false, err
	}
	rows, err := collect(ctx, r, "price", rowToUpstream, r.sql.price, limit, key)
	if err != nil || len(rows) == 0 {
		return u, false, err
	}
	return rows[0], true, nil
}

func rowToUpstream(row pgx.CollectableRow) (u Upstream, err error) {
	var pausedUs, seenUs int64
	err = row.Scan(&u.Share, &pausedUs, &seenUs)
	if u.Seen = instant(seenUs); pausedUs != 0 {
		u.PausedUntil = instant(pausedUs)
	}
	return u, err
}
