package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/pgratelimit/pgratelimit/otellimit"
	"github.com/pgratelimit/pgratelimit/promlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sloglimit"
)

// hook keeps the refusals for Config.Refused, and the events of refusals and of lost leases, for a test that calls from one
// goroutine.
type hook struct {
	told   []ratelimit.Refusal
	events []ratelimit.Event
}

func (h *hook) refused(_ context.Context, r ratelimit.Refusal) { h.told = append(h.told, r) }

func (h *hook) Observe(_ context.Context, event ratelimit.Event) {
	switch e := event.(type) {
	case ratelimit.Decided:
		if !e.Decision.Allowed {
			h.events = append(h.events, e)
		}
	case ratelimit.Leased:
		if e.Lost {
			h.events = append(h.events, e)
		}
	}
}

// hooked returns a limiter that tells the hook, and the stored key of one of its requests.
func (b *bundle) hooked(t *testing.T, config ratelimit.Config) (*ratelimit.Limiter, *hook) {
	t.Helper()
	h := &hook{}
	config.Refused = h.refused
	if config.Observer == nil {
		config.Observer = h
	}
	return b.with(t, config), h
}

// Each bucket that refused a call is reported once, with its stored key, its cost, and the time.
func TestRefusedIsToldOfEachBucketThatRefused(t *testing.T) {
	t.Parallel()
	plain, hashed := setup(t), setup(t) // programs with different secrets have a database each
	secret := []byte("sixteen bytes at least")
	for name, test := range map[string]struct {
		config ratelimit.Config
		again  bool // whether the second refusal is reported, from the cache
	}{
		"Plain":         {},
		"Hashed":        {config: ratelimit.Config{HashKey: secret}},
		"Alone":         {config: ratelimit.Config{NoBatching: true}},
		"Cached":        {config: ratelimit.Config{RefusalCache: refusalEntries}, again: true},
		"HashedCached":  {config: ratelimit.Config{RefusalCache: refusalEntries, HashKey: secret}, again: true},
		"CachedNotYet":  {config: ratelimit.Config{RefusalCache: refusalEntries}},
		"OtherObserver": {config: ratelimit.Config{Observer: &heardCosts{}}},
	} {
		for calls, of := range map[string]func(tight, roomy ratelimit.Request) []ratelimit.Request{
			"OneLimit":  func(tight, _ ratelimit.Request) []ratelimit.Request { return []ratelimit.Request{tight} },
			"TwoLimits": func(tight, roomy ratelimit.Request) []ratelimit.Request { return []ratelimit.Request{roomy, tight} },
			"OneBucketTwice": func(tight, roomy ratelimit.Request) []ratelimit.Request {
				return []ratelimit.Request{tight.Cost(0.25), roomy, tight.Cost(0.75)}
			},
		} {
			t.Run(name+"/"+calls, func(t *testing.T) {
				t.Parallel()
				b := plain
				if test.config.HashKey != nil {
					b = hashed
				}
				limiter, h := b.hooked(t, test.config)
				empty := tight.For(t.Name())
				requests := of(empty, roomy.For(t.Name()))
				takeAll(t, limiter, empty)
				_, err := limiter.Check(t.Context(), requests...)
				require.NoError(t, err)
				require.Empty(t, h.told, "what was allowed, or only looked at, is not told")

				d, err := limiter.Take(t.Context(), requests...)
				require.NoError(t, err)
				for test.again && !h.told[0].Cached { // a cached refusal may expire after a second
					h.told = nil
					d, err = limiter.Take(ratelimit.WithRoute(t.Context(), "GET /"), requests...)
					require.NoError(t, err)
					require.Len(t, h.told, 1)
				}
				key, err := limiter.StoredKey(empty)
				require.NoError(t, err)
				want := ratelimit.Refusal{Limit: tight.Name(), Key: key, Cost: 1, At: d.At, Cached: test.again}
				if test.again {
					want.Route = "GET /"
				}
				require.Equal(t, []ratelimit.Refusal{want}, h.told)
			})
		}
	}
}

func TestRefusedIsToldOfReserve(t *testing.T) {
	t.Parallel()
	limiter, h := setup(t).hooked(t, ratelimit.Config{})
	_, err := limiter.Reserve(t.Context(), bounded.For("key").Cost(2))
	require.NoError(t, err)
	require.Empty(t, h.told, "what has to wait is not refused")
	r, err := limiter.Reserve(t.Context(), bounded.For("key"), bounded.For("other").Cost(0.5))
	require.NoError(t, err)
	require.False(t, r.Allowed)
	_, err = limiter.Value(t.Context(), bounded.For("key"))
	require.NoError(t, err)
	require.Equal(t, []ratelimit.Refusal{{Limit: "bounded", Key: "key", Cost: 1, At: r.At}}, h.told)
}

// A refusal in a transaction of InTx is reported when the transaction has ended, to the hook and to the Observer, also if the
// refusal made it roll back.
func TestRefusedIsToldWhenTheTransactionHasEnded(t *testing.T) {
	t.Parallel()
	onEach(t, testRefusedIsToldWhenTheTransactionHasEnded, onPostgres, inMemory)
}

func testRefusedIsToldWhenTheTransactionHasEnded(t *testing.T, on backend) {
	b := on.setup(t)
	for name, refused := range map[string]func(ctx context.Context, tx pgx.Tx, take func(pgx.Tx) error) error{
		"AndCommitted":  func(_ context.Context, tx pgx.Tx, take func(pgx.Tx) error) error { _ = take(tx); return nil },
		"AndRolledBack": func(_ context.Context, tx pgx.Tx, take func(pgx.Tx) error) error { return take(tx) },
		"AndFailed": func(_ context.Context, tx pgx.Tx, take func(pgx.Tx) error) error {
			_ = take(tx)
			return errUndone
		},
		"AndPanicked": func(_ context.Context, tx pgx.Tx, take func(pgx.Tx) error) error { panic(take(tx)) },
		"InANestedOneThatIsUndone": func(ctx context.Context, tx pgx.Tx, take func(pgx.Tx) error) error {
			_ = pgx.BeginFunc(ctx, tx, take)
			return nil
		},
		"AndEndedByItsFunction": func(ctx context.Context, tx pgx.Tx, take func(pgx.Tx) error) error {
			return errors.Join(take(tx), tx.Rollback(ctx))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limiter, h := b.hooked(t, ratelimit.Config{})
			empty := tight.For(t.Name())
			takeAll(t, limiter, empty)
			var want ratelimit.Refusal
			require.Equal(t, name == "AndPanicked", ended(func() {
				_ = limiter.InTx(t.Context(), func(tx pgx.Tx) error {
					err := refused(t.Context(), tx, func(tx pgx.Tx) error {
						d, err := limiter.WithTx(tx).Take(ratelimit.WithRoute(t.Context(), "POST /"), empty)
						want = ratelimit.Refusal{Limit: tight.Name(), Key: t.Name(), Route: "POST /", Cost: 1, At: d.At}
						return errors.Join(err, d.Err())
					})
					if len(h.told)+len(h.events) > 0 {
						return fmt.Errorf("told before the transaction had ended: %v %v", h.told, h.events)
					}
					return err
				})
			}))
			require.Equal(t, []ratelimit.Refusal{want}, h.told)
			require.Len(t, h.events, 1)
			require.Equal(t, tight.Name(), h.events[0].(ratelimit.Decided).Decision.States[0].Limit.Name())
		})
	}
}

// An attempt that lost a conflict reports nothing: it is retried, or its caller got an error.
func TestRefusedIsNotToldOfAttemptsThatLostAConflict(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, "CREATE TABLE public.contested (key text PRIMARY KEY, n integer NOT NULL)")
	for name, test := range map[string]struct {
		lost   int  // attempts
		filled bool // whether the bucket is full by the last attempt
		err    error
		told   int
	}{
		"RefusedAgain":     {lost: 3, err: ratelimit.ErrLimited, told: 1},
		"AllowedInTheLast": {lost: 2, filled: true, told: 0},
		"AllOfThemLost":    {lost: 4, err: ratelimit.ErrContended, told: 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limiter, h := b.hooked(t, ratelimit.Config{MaxAttempts: 4})
			empty := tight.For(t.Name())
			takeAll(t, limiter, empty)
			b.exec(t, "INSERT INTO public.contested VALUES ($1, 0)", t.Name())
			attempts := 0
			err := limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				attempts++
				if test.filled && attempts > test.lost {
					if err := b.limiter.Reset(t.Context(), empty); err != nil {
						return err
					}
				}
				d, err := limiter.WithTx(tx).Take(t.Context(), empty)
				if err != nil {
					return err
				}
				if attempts <= test.lost {
					b.exec(t, "UPDATE public.contested SET n = n + 1 WHERE key = $1", t.Name())
					_, err = tx.Exec(t.Context(), "UPDATE public.contested SET n = n + 1 WHERE key = $1", t.Name())
					return err
				}
				return d.Err()
			})
			require.ErrorIs(t, err, test.err)
			require.Equal(t, min(test.lost+1, 4), attempts)
			require.Len(t, h.told, test.told)
			require.Len(t, h.events, test.told)
		})
	}
}

// An attempt that lost its connection is made again, and tells nothing.
func TestRefusedIsNotToldOfAttemptsThatLostTheirConnection(t *testing.T) {
	t.Parallel()
	for name, told := range map[string]int{"RefusedAgain": 1, "NeverConnectedAgain": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var isAway atomic.Bool
			b := setup(t, func(c *pgxpool.Config) {
				c.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
					if isAway.Load() {
						return false, errUndone
					}
					return true, nil
				}
			})
			limiter, h := b.hooked(t, ratelimit.Config{})
			takeAll(t, limiter, tight.For("key"))
			attempts := 0
			err := limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				attempts++
				d, err := limiter.WithTx(tx).Take(t.Context(), tight.For("key"))
				if err == nil && attempts == 1 {
					isAway.Store(told == 0)
					_, err = tx.Exec(t.Context(), "SELECT pg_terminate_backend(pg_backend_pid())")
				}
				return errors.Join(err, d.Err())
			})
			require.Equal(t, told == 1, errors.Is(err, ratelimit.ErrLimited), err)
			require.Equal(t, 1+told, attempts)
			require.Len(t, h.told, told)
			require.Len(t, h.events, told)
			isAway.Store(false)
		})
	}
}

// The Limiter cannot know how a caller's own transaction ends, so it reports a refusal in it at once.
func TestRefusedIsToldAtOnceInATransactionOfTheCallers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limiter, h := b.hooked(t, ratelimit.Config{})
	takeAll(t, limiter, tight.For("key"))
	tx := b.begin(t, pgx.ReadCommitted)
	d, err := limiter.WithTx(tx).Take(t.Context(), tight.For("key"), roomy.For("key"))
	require.NoError(t, err)
	want := []ratelimit.Refusal{{Limit: tight.Name(), Key: "key", Cost: 1, At: d.At, Pending: true}}
	require.Equal(t, want, h.told)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, want, h.told)
}

// The Observer receives a lost lease although the loss makes the transaction roll back.
func TestALostLeaseIsToldWhenTheTransactionRollsBack(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		limiter, h := on.setup(t).hooked(t, ratelimit.Config{})
		slots := ratelimit.Define("slots", ratelimit.Concurrency{Most: 1})
		lease, err := limiter.Acquire(t.Context(), slots.For("key"))
		require.NoError(t, err)
		require.NoError(t, limiter.Release(t.Context(), lease.ID))
		err = limiter.InTx(t.Context(), func(tx pgx.Tx) error { return errOf(limiter.WithTx(tx).RenewLease(t.Context(), lease.ID)) })
		require.ErrorIs(t, err, ratelimit.ErrLeaseLost)
		require.Equal(t, []ratelimit.Event{ratelimit.Leased{Verb: "renew_lease", Limit: "slots", Slots: 1, Lost: true}}, h.events)
	}, onPostgres, inMemory)
}

// failures is an Observer that keeps the Failed events.
type failures struct {
	mu   sync.Mutex
	told []ratelimit.Failed
	then func() // called with a Pruned, if it is not nil
}

func (f *failures) Observe(_ context.Context, event ratelimit.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch e := event.(type) {
	case ratelimit.Failed:
		f.told = append(f.told, e)
	case ratelimit.Pruned:
		if f.then != nil {
			f.then()
		}
	}
}

func TestFailedNamesTheFirstLimitOfTheCall(t *testing.T) {
	t.Parallel()
	b, heard := setup(t), &failures{}
	limiter := b.with(t, ratelimit.Config{Observer: heard})
	b.exec(t, `DROP TABLE ratelimit.buckets`)
	zebra, ant := ratelimit.Define("zebra", hoard(1)), ratelimit.Define("ant", hoard(1))
	_, err := limiter.Take(t.Context(), zebra.For("key"), ant.For("key"))
	require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
	require.ErrorContains(t, err, `take "zebra"`)
	require.Len(t, heard.told, 1)
	require.Equal(t, "zebra", heard.told[0].Limit)
}

// What a Limiter did on a real server is in the log, the metrics and the spans, and no key is.
func TestObservers(t *testing.T) {
	t.Parallel()
	const secret = "hunter2"
	b := setup(t)
	var logged bytes.Buffer
	logs := sloglimit.New(sloglimit.Config{Logger: slog.New(slog.NewJSONHandler(&logged, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	counts, err := promlimit.New(promlimit.Config{})
	require.NoError(t, err)
	reader, spans := sdkmetric.NewManualReader(), tracetest.NewSpanRecorder()
	traces, err := otellimit.New(otellimit.Config{
		MeterProvider:  sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)),
		TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)),
	})
	require.NoError(t, err)
	limiter := b.with(t, ratelimit.Config{RefusalCache: 10, Observer: ratelimit.Observers(logs, counts, traces)})
	uploads := ratelimit.Define("uploads", ratelimit.FixedWindow{Rate: 3, Period: century})
	tasks := ratelimit.Define("tasks", ratelimit.TokenBucket{Rate: 10, Period: century})

	for range 4 { // three times allowed, then refused
		_, err := limiter.Take(t.Context(), uploads.For(secret), tasks.For(secret))
		require.NoError(t, err)
	}
	_, err = limiter.Take(t.Context(), uploads.For(secret)) // refused from memory
	require.NoError(t, err)
	r, err := limiter.Reserve(t.Context(), tasks.For(secret).Cost(5))
	require.NoError(t, err)
	require.NoError(t, limiter.Settle(t.Context(), r.ID, tasks.For(secret).Cost(2)))
	undone, ended := errors.New("undone"), map[error]time.Time{}
	for _, outcome := range []error{nil, undone} { // decisions that are rolled back are not reported
		err = limiter.InTx(t.Context(), func(tx pgx.Tx) error {
			_, err := limiter.WithTx(tx).Take(t.Context(), tasks.For(secret))
			ended[outcome] = time.Now()
			return errors.Join(err, outcome)
		})
		require.ErrorIs(t, err, outcome)
	}
	inTx := spans.Ended()[len(spans.Ended())-1]
	require.False(t, inTx.EndTime().After(ended[nil]), "the span ends with the call, and not with the transaction")
	b.pool.Close()
	_, err = limiter.Take(t.Context(), tasks.For(secret))
	require.Error(t, err)

	registry := prometheus.NewPedanticRegistry()
	require.NoError(t, registry.Register(counts))
	require.NoError(t, testutil.GatherAndCompare(registry, bytes.NewBufferString(`
# HELP ratelimit_requests_total Requests to a limit, by result.
# TYPE ratelimit_requests_total counter
ratelimit_requests_total{cached="false",kind="",limit="tasks",result="failed",verb="take"} 1
ratelimit_requests_total{cached="false",kind="fixed_window",limit="uploads",result="allowed",verb="take"} 3
ratelimit_requests_total{cached="false",kind="fixed_window",limit="uploads",result="refused",verb="take"} 1
ratelimit_requests_total{cached="true",kind="fixed_window",limit="uploads",result="refused",verb="take"} 1
ratelimit_requests_total{cached="false",kind="token_bucket",limit="tasks",result="allowed",verb="take"} 4
ratelimit_requests_total{cached="false",kind="token_bucket",limit="tasks",result="reserved",verb="reserve"} 1
ratelimit_requests_total{cached="false",kind="token_bucket",limit="tasks",result="vetoed",verb="take"} 1
# HELP ratelimit_settlement_delta_tokens_total Difference between the reserved and the actual cost.
# TYPE ratelimit_settlement_delta_tokens_total counter
ratelimit_settlement_delta_tokens_total{direction="returned",limit="tasks"} 3
`), "ratelimit_requests_total", "ratelimit_settlement_delta_tokens_total"))

	var measured metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(t.Context(), &measured))
	var requests float64
	for _, m := range measured.ScopeMetrics[0].Metrics {
		if m.Name == "ratelimit.requests" {
			for _, p := range m.Data.(metricdata.Sum[float64]).DataPoints {
				requests += p.Value
			}
		}
	}
	require.EqualValues(t, 12, requests, "as many as above")
	require.Len(t, spans.Ended(), 8, "one for each call that was decided or failed")
	require.NotContains(t, logged.String(), secret)
	require.Equal(t, 2, bytes.Count(logged.Bytes(), []byte("ratelimit: refused")), logged.String())
}
