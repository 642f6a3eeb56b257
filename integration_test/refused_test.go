package integration_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
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

// hooked returns a limiter that tells the hook.
func (b *bundle) hooked(t *testing.T, config ratelimit.Config) (*ratelimit.Limiter, *hook) {
	t.Helper()
	h := &hook{}
	config.Refused, config.Observer = h.refused, h
	return b.with(t, config), h
}

// Each bucket that refused a call is reported once, with its stored key, its cost, and the time.
func TestRefusedIsToldOfEachBucketThatRefused(t *testing.T) {
	t.Parallel()
	for _, secret := range [][]byte{nil, []byte("sixteen bytes at least")} {
		b := setup(t) // programs with different secrets have a database each
		for _, entries := range []int{0, refusalEntries} {
			t.Run(fmt.Sprintf("Hashed=%t/Cached=%t", secret != nil, entries > 0), func(t *testing.T) {
				t.Parallel()
				limiter, h := b.hooked(t, ratelimit.Config{HashKey: secret, RefusalCache: entries})
				empty := tight.For(t.Name())
				requests := []ratelimit.Request{empty.Cost(0.25), roomy.For(t.Name()), empty.Cost(0.75)}
				takeAll(t, limiter, empty)
				require.NoError(t, errOf(limiter.Check(t.Context(), requests...)))
				require.Empty(t, h.told, "what was allowed, or only looked at, is not told")

				key, err := limiter.StoredKey(empty)
				require.NoError(t, err)
				for { // a cached refusal may expire after a second
					h.told = nil
					d, err := limiter.Take(ratelimit.WithRoute(t.Context(), "GET /"), requests...)
					require.NoError(t, err)
					require.Len(t, h.told, 1)
					isCached := h.told[0].Cached
					want := ratelimit.Refusal{Limit: tight.Name(), Key: key, Route: "GET /", Cost: 1, At: d.At, Cached: isCached}
					require.Equal(t, want, h.told[0])
					if isCached || entries == 0 {
						require.Equal(t, entries > 0, isCached)
						break
					}
				}
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
	onEach(t, func(t *testing.T, on backend) {
		b := on.setup(t)
		for name, refused := range map[string]func(tx pgx.Tx, take func(pgx.Tx) error) error{
			"AndCommitted":  func(tx pgx.Tx, take func(pgx.Tx) error) error { _ = take(tx); return nil },
			"AndRolledBack": func(tx pgx.Tx, take func(pgx.Tx) error) error { return take(tx) },
			"AndPanicked":   func(tx pgx.Tx, take func(pgx.Tx) error) error { panic(take(tx)) },
			"AndEndedByItsFunction": func(tx pgx.Tx, take func(pgx.Tx) error) error {
				return errors.Join(take(tx), tx.Rollback(context.Background()))
			},
			"InANestedOneThatIsUndone": func(tx pgx.Tx, take func(pgx.Tx) error) error {
				_ = pgx.BeginFunc(context.Background(), tx, take)
				return nil
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
						err := refused(tx, func(tx pgx.Tx) error {
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
	}, onPostgres, inMemory)
}

// An attempt that lost a conflict or its connection reports nothing: it is retried, or its caller got an error.
func TestRefusedIsNotToldOfAttemptsThatAreLost(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		lost        int  // attempts
		connections bool // whether they lose their connections
		filled      bool // whether the bucket is full by the last attempt
		isAway      bool // whether no connection can be made after the first attempt
		want        error
		told        int
	}{
		"RefusedAgain":        {lost: 3, want: ratelimit.ErrLimited, told: 1},
		"AllowedInTheLast":    {lost: 2, filled: true},
		"AllOfThemLost":       {lost: 4, want: ratelimit.ErrContended},
		"ConnectedAgain":      {lost: 1, connections: true, want: ratelimit.ErrLimited, told: 1},
		"NeverConnectedAgain": {lost: 1, connections: true, isAway: true, want: errUndone},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var isAway atomic.Bool
			s := newStand(t, func(c *pgxpool.Config) {
				c.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
					if isAway.Load() {
						return false, errUndone
					}
					return true, nil
				}
			})
			limiter, h := s.hooked(t, ratelimit.Config{MaxAttempts: 4})
			empty, lose := tight.For("key"), "UPDATE public.messages SET key = key || '!'"
			takeAll(t, limiter, empty)
			s.outside.exec(t, "INSERT INTO public.messages (key) VALUES ('contested')")
			attempts := 0
			err := limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				attempts++
				if test.filled && attempts > test.lost {
					require.NoError(t, s.outside.limiter.Reset(t.Context(), empty))
				}
				err := limiter.WithTx(tx).Require(t.Context(), empty)
				if attempts > test.lost || !errors.Is(err, ratelimit.ErrLimited) {
					return err
				}
				if test.connections {
					isAway.Store(test.isAway)
					return errOf(tx.Exec(t.Context(), "SELECT pg_terminate_backend(pg_backend_pid())"))
				}
				s.outside.exec(t, lose)
				return errOf(tx.Exec(t.Context(), lose))
			})
			require.ErrorIs(t, err, test.want)
			if !test.isAway {
				require.Equal(t, min(test.lost+1, 4), attempts)
			}
			require.Len(t, h.told, test.told)
			require.Len(t, h.events, test.told)
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
