// Command wait measures how late callers of Limiter.Wait come through, beside how late this machine's timers are.
//
//	go run ./wait [-callers 50] [-rate 100] [-rounds 3]
//
// In each round so many callers ask one limit for a token each, one after the other, once what it held is gone and is owed
// for as long as they take to ask. The moment of each is the ready_us of his reservation; he is late by the time
// from then until Wait has returned to him. The server is on this machine, so that its clock is that of the callers. At the
// same moments, in the same process and each on a goroutine of its own, timers of as many sleepers fire that do nothing else: what
// they are late by is not the Limiter's.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/bench/internal/command"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// options are what the program is asked to do.
type options struct {
	callers, rounds int
	rate            float64
}

func main() {
	command.Run("wait", parse, func(ctx context.Context, o options) error { return measure(ctx, os.Stdout, o) })
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("wait", flag.ContinueOnError)
	flags.IntVar(&o.callers, "callers", 50, "how many wait at the same time")
	flags.IntVar(&o.rounds, "rounds", 3, "how often")
	flags.Float64Var(&o.rate, "rate", 100, "tokens a second")
	return o, command.Parse(flags, args)
}

// measure starts a server, and writes a line for each round.
func measure(ctx context.Context, w io.Writer, o options) (err error) {
	postgres, err := server.StartPostgres(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, postgres.Close()) }()
	config, err := pgxpool.ParseConfig(postgres.URL())
	if err != nil {
		return err
	}
	config.MaxConns = 16
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		return err
	}
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	if err != nil {
		return err
	}
	for n := range o.rounds {
		r := round{pool: pool, limiter: limiter, options: o}
		if err := r.run(ctx, fmt.Sprintf("round %d", n+1)); err != nil {
			return err
		}
		if _, err := fmt.Fprintf(w, "round %d: %d callers, %g a second: late by %s; timers alone %s; in the order of asking: %v\n",
			n+1, o.callers, o.rate, figures(r.late), figures(r.timers), r.inOrder); err != nil {
			return err
		}
	}
	return nil
}

// round is one measurement.
type round struct {
	options

	pool         *pgxpool.Pool
	limiter      *ratelimit.Limiter
	late, timers []time.Duration
	inOrder      bool
}

// run has the callers wait for the bucket of a key.
func (r *round) run(ctx context.Context, key string) error {
	limit, err := ratelimit.NewLimit("turn", ratelimit.TokenBucket{Rate: r.rate, Period: time.Second, Capacity: 1})
	if err != nil {
		return err
	}
	if _, err := r.pool.Exec(ctx, "TRUNCATE ratelimit.reservations"); err != nil {
		return err
	}
	head, err := r.limiter.Reserve(ctx, limit.For(key).Cost(r.rate)) // a second in which nobody's moment comes
	if err != nil {
		return err
	}
	var callers sync.WaitGroup
	failed, back := make([]error, r.callers), make([]time.Time, r.callers)
	for i := range r.callers {
		callers.Go(func() {
			_, failed[i] = r.limiter.Wait(ctx, limit.For(key))
			back[i] = time.Now()
		})
		if err := r.awaitReserved(ctx, i+2); err != nil {
			return err
		}
	}
	ready, err := r.moments(ctx, head.ID)
	if err != nil {
		return err
	}
	r.timers = make([]time.Duration, r.callers)
	for i, at := range ready {
		callers.Go(func() {
			time.Sleep(time.Until(at))
			r.timers[i] = time.Since(at)
		})
	}
	callers.Wait()
	for i, at := range ready {
		r.late = append(r.late, back[i].Sub(at))
	}
	r.inOrder = slices.IsSortedFunc(back, time.Time.Compare)
	return errors.Join(failed...)
}

// awaitReserved waits until there are so many reservations.
func (r *round) awaitReserved(ctx context.Context, want int) error {
	for {
		var n int
		if err := r.pool.QueryRow(ctx, "SELECT count(*) FROM ratelimit.reservations").Scan(&n); err != nil || n >= want {
			return err
		}
	}
}

// moments returns when the callers are due, without the reservation that was made before them.
func (r *round) moments(ctx context.Context, head string) ([]time.Time, error) {
	rows, err := r.pool.Query(ctx, "SELECT ready_us FROM ratelimit.reservations WHERE id <> $1 ORDER BY ready_us", head)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (time.Time, error) {
		var us int64
		err := row.Scan(&us)
		return time.UnixMicro(us), err
	})
}

// figures returns the median, the nine in ten and the largest of the spans.
func figures(spans []time.Duration) string {
	sorted := slices.SortedFunc(slices.Values(spans), cmp.Compare[time.Duration])
	at := func(share float64) time.Duration {
		return sorted[int(share*float64(len(sorted)-1))].Round(10 * time.Microsecond)
	}
	return fmt.Sprintf("p50 %v, p90 %v, most %v", at(0.5), at(0.9), at(1))
}
