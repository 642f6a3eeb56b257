package ratelimit

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

// onRule is a source without rules that runs a function for each request, before the request reads its price.
type onRule func()

func (f onRule) RulingFor(Limit, string, string) *Ruling { f(); return nil }
func (onRule) RulingsOf(string) []*Ruling                { return nil }

// nowhere is a pool without a server, which counts statements.
type nowhere struct{ sent atomic.Int64 }

var errNowhere = errors.New("there is no server")

func (*nowhere) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errNowhere
}

func (p *nowhere) Query(context.Context, string, ...any) (pgx.Rows, error) {
	p.sent.Add(1)
	return nil, errNowhere
}

func (*nowhere) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) { return nil, errNowhere }

func (*nowhere) SendBatch(_ context.Context, batch *pgx.Batch) pgx.BatchResults {
	return pgx.FailedBatchResults(batch, errNowhere)
}

// TestACallReadsItsPricesBeforeAnExchangeBegins: an exchange that begins with the first price of a call could change the second.
func TestACallReadsItsPricesBeforeAnExchangeBegins(t *testing.T) {
	t.Parallel()
	api := Define("api", Adaptive{Contract: PerSecond(100), Apply: true})
	keys := []string{"ada", "bob", "eve"}
	for name, c := range map[string]struct {
		call  func(context.Context, *Limiter, ...Request) error
		plans int
	}{
		"Take": {func(ctx context.Context, l *Limiter, r ...Request) error { _, err := l.Take(ctx, r...); return err }, 1},
		"Wait": {func(ctx context.Context, l *Limiter, r ...Request) error { _, err := l.Wait(ctx, r...); return err }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				pool, asked := &nowhere{}, 0
				policies := onRule(func() {
					asked++
					synctest.Wait() // for an exchange that has begun
					require.Zero(t, pool.sent.Load(), "before price %d", asked)
				})
				limiter, err := New(pool, Config{Policies: policies, NoBatching: true, AsOf: func() time.Time { return time.UnixMicro(1) }})
				require.NoError(t, err)
				require.Error(t, c.call(t.Context(), limiter, api.For(keys[0]), api.For(keys[1]), api.For(keys[2]))) // there is no server
				require.Equal(t, c.plans*len(keys), asked)
				synctest.Wait()
				require.Positive(t, pool.sent.Load())
			})
		})
	}
}
