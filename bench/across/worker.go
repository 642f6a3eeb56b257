package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The ways to do it.
const (
	raw       = "raw"       // the bare update of a row at READ COMMITTED
	committed = "committed" // the limit at READ COMMITTED, in transactions that the Limiter did not begin
	own       = "own"       // InTx
	shared    = "shared"    // InTx with Config.SharedQueues
)

// ways returns them in the order of the report.
func ways() []string { return []string{raw, committed, own, shared} }

// work measures, in the way of each line that it reads, and answers with a line.
func work(ctx context.Context, o options, in io.Reader, out io.Writer) error {
	config, err := pgxpool.ParseConfig(o.URL)
	if err != nil {
		return err
	}
	config.MaxConns, config.MinConns = int32(o.Workers), int32(o.Workers)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	var attempts atomic.Int64
	calls := make(map[string]func(context.Context) error)
	for _, way := range ways() {
		if calls[way], err = o.call(pool, way, &attempts); err != nil {
			return err
		}
	}
	answers, asked := json.NewEncoder(out), bufio.NewScanner(in)
	for asked.Scan() {
		if _, err = sample(ctx, o.Workers, o.LeadIn, calls[asked.Text()]); err != nil {
			return err
		}
		attempts.Store(0)
		m, began := measured{}, time.Now()
		if m.Samples, err = sample(ctx, o.Workers, o.For, calls[asked.Text()]); err != nil {
			return err
		}
		m.Attempts, m.Elapsed = int(attempts.Load()), time.Since(began)
		if err := answers.Encode(m); err != nil {
			return err
		}
	}
	return asked.Err()
}

// call returns how a way does it once.
func (o options) call(pool *pgxpool.Pool, way string, attempts *atomic.Int64) (func(context.Context) error, error) {
	body := func(ctx context.Context, tx pgx.Tx, take func() error) error {
		attempts.Add(1)
		if o.ReadFirst {
			var n int
			if err := tx.QueryRow(ctx, `SELECT count(*) FROM pg_catalog.pg_namespace WHERE oid = $1`, 11).Scan(&n); err != nil {
				return err
			}
		}
		if err := take(); err != nil {
			return err
		}
		if o.Body > 0 {
			time.Sleep(o.Body)
		}
		return nil
	}
	if way == raw {
		return func(ctx context.Context) error {
			return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
				return body(ctx, tx, func() error {
					_, err := tx.Exec(ctx, `UPDATE counter SET value = value - 1 WHERE id = $1`, 1)
					return err
				})
			})
		}, nil
	}
	limit, err := ratelimit.NewLimit("hot", ratelimit.TokenBucket{Rate: 1e9, Period: time.Second})
	if err != nil {
		return nil, err
	}
	limiter, err := ratelimit.New(pool, ratelimit.Config{SharedQueues: way == shared, MaxAttempts: math.MaxInt32})
	if err != nil {
		return nil, err
	}
	begin := limiter.InTx
	if way == committed {
		begin = func(ctx context.Context, fn func(pgx.Tx) error) error {
			return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, fn)
		}
	}
	return func(ctx context.Context) error {
		if o.Named {
			ctx = ratelimit.WithQueue(ctx, limit.For(way))
		}
		return begin(ctx, func(tx pgx.Tx) error {
			return body(ctx, tx, func() error {
				d, err := limiter.WithTx(tx).Take(ctx, limit.For(way))
				if err == nil && !d.Allowed {
					err = d.Err()
				}
				return err
			})
		})
	}, nil
}

// sample runs a call on all workers for a while, and returns how long each took.
func sample(ctx context.Context, workers int, d time.Duration, call func(context.Context) error) ([]time.Duration, error) {
	group, ctx := errgroup.WithContext(ctx)
	samples := make([][]time.Duration, workers)
	end := time.Now().Add(d)
	for i := range samples {
		group.Go(func() error {
			for began := time.Now(); began.Before(end); {
				if err := call(ctx); err != nil {
					return err
				}
				now := time.Now()
				samples[i] = append(samples[i], now.Sub(began))
				began = now
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return slices.Concat(samples...), nil
}
