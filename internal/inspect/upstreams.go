package inspect

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Upstream is what package adaptive knows of the upstream of a limit and a key. Only the programs know whether they
// hold requests to it.
type Upstream struct {
	// Share is the share of the contract that the upstream accepts.
	Share float64 `json:"share"`
	// PausedUntil is the end of the pause that it asked for. Zero: it did not, or the pause is over.
	PausedUntil time.Time `json:"paused_until,omitzero"`
	// Seen is the time of the latest report.
	Seen time.Time `json:"seen"`
}

// Upstream returns the stored state of the upstream of a limit and a key at an instant, or nil if there is none.
func (r *Reader) Upstream(ctx context.Context, limit, key string, at time.Time) (*Upstream, error) {
	if err := checkBucket(limit, key); err != nil {
		return nil, err
	}
	rows, err := collect(ctx, r, "upstream", rowToUpstream, r.sql.upstream, limit, key)
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	u := &rows[0]
	if !u.PausedUntil.After(at) {
		u.PausedUntil = time.Time{}
	}
	return u, nil
}

func rowToUpstream(row pgx.CollectableRow) (u Upstream, err error) {
	var pausedUs, seenUs int64
	err = row.Scan(&u.Share, &pausedUs, &seenUs)
	u.Seen, u.PausedUntil = instant(seenUs), instant(pausedUs)
	return u, err
}
