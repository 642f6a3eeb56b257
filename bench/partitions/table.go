package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/internal/roundtrips"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	connections = 8
	capacity    = 8e5
	idleEvery   = 10 // one in so many rows belongs to the pruned limit
)

// idleLimit returns the limit whose buckets are full.
func idleLimit() ratelimit.Limit {
	return ratelimit.Define("idle", ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: 10})
}

// busyLimits returns the limits of the Takes. Almost no tokens arrive during the measurement.
func busyLimits() (all []ratelimit.Limit) {
	for _, name := range []string{"keys", "keys2", "keys3", "keys4", "keys5"} {
		all = append(all, ratelimit.Define(name, ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: capacity}))
	}
	return all
}

// table is a table of buckets in a database of its own.
type table struct {
	*server.Database
	partitions int
	o          options
	meter      *server.Meter // of the server
	pool       *pgxpool.Pool
	limiter    *ratelimit.Limiter
}

// newTable creates and fills a table.
func newTable(ctx context.Context, postgres *server.Postgres, o options, partitions int) (_ *table, err error) {
	database, err := postgres.NewDatabase(ctx)
	if err != nil {
		return nil, err
	}
	t := &table{Database: database, partitions: partitions, o: o, meter: server.NewMeter(postgres)}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close(context.WithoutCancel(ctx)))
		}
	}()
	if err := migrations.Partition(ctx, t.Admin(), migrations.Config{Partitions: partitions}); err != nil {
		return nil, err
	}
	const rows = `
		INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity)
		SELECT CASE WHEN i % $3::int = 0 THEN 'idle' ELSE (ARRAY['keys', 'keys2', 'keys3', 'keys4', 'keys5'])[1 + i % 5] END, 'k' || lpad(i::text, 9, '0'), 0,
			CASE WHEN i % $3::int = 0 THEN 10 ELSE $1::float8 END, CASE WHEN i % $3::int = 0 THEN 0 ELSE (extract(epoch FROM statement_timestamp()) * 1000000)::bigint END, $1::float8
		FROM generate_series(0, $2::int - 1) AS i`
	for _, statement := range []string{"ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()"} {
		if _, err := t.Admin().Exec(ctx, statement); err != nil {
			return nil, fmt.Errorf("%s: %w", statement, err)
		}
	}
	if _, err := t.Admin().Exec(ctx, rows, capacity, o.rows, idleEvery); err != nil {
		return nil, fmt.Errorf("make %d buckets: %w", o.rows, err)
	}
	if err := errors.Join(t.Settle(ctx), t.Checkpoint(ctx)); err != nil {
		return nil, err
	}
	if t.pool, err = t.Pool(ctx, connections, &roundtrips.Counter{}); err != nil {
		return nil, err
	}
	t.limiter, err = ratelimit.New(t.pool, ratelimit.Config{})
	return t, err
}

func (t *table) close(ctx context.Context) (err error) {
	if t.limiter != nil {
		err = t.limiter.Close(ctx)
	}
	if t.pool != nil {
		t.pool.Close()
	}
	return errors.Join(err, t.Drop(ctx))
}

// take makes the Takes of a round, each from so many limits.
func (t *table) take(ctx context.Context, group *load.Group, from int) (load.Result, error) {
	limits := busyLimits()
	group.Meter = t.meter.Seconds
	return group.Run(ctx, load.Amount{Calls: t.o.calls}, func(ctx context.Context, c *load.Caller) error {
		requests := make([]ratelimit.Request, from)
		for i := range requests {
			key := c.Random.IntN(t.o.rows/idleEvery)*idleEvery + 1 + i // not an idle row
			requests[i] = limits[key%len(limits)].For(fmt.Sprintf("k%09d", key))
		}
		return t.limiter.Require(ctx, requests...)
	})
}

// clean prunes full rows, vacuums, and writes the durations.
func (t *table) clean(ctx context.Context, w io.Writer) error {
	used, began := t.meter.Seconds(), time.Now()
	deleted, err := t.limiter.Prune(ctx, idleLimit())
	if err != nil {
		return err
	}
	elapsed, used := time.Since(began), t.meter.Seconds()-used
	rows, err := t.Admin().Query(ctx, `SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'ratelimit'::regnamespace AND relname LIKE 'buckets%' AND relkind = 'r'`)
	if err != nil {
		return err
	}
	leaves, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	var all, longest time.Duration
	for _, leaf := range leaves {
		began := time.Now()
		if _, err := t.Admin().Exec(ctx, "VACUUM "+leaf); err != nil {
			return err
		}
		all, longest = all+time.Since(began), max(longest, time.Since(began))
	}
	_, err = fmt.Fprintf(w, "%2d partitions: Prune deleted %d in %.1f s, %.1f s of the server's processor; VACUUM took %.2f s, the longest %.2f s\n",
		t.partitions, deleted, elapsed.Seconds(), used, all.Seconds(), longest.Seconds())
	return err
}
