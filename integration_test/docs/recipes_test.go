package docs_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/ratelimit/prefetch"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/rules"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// The variables and functions below hold code blocks of docs/recipes.md. The tests below run each of them, and check
// the figures of the page.

// recipeRegion is the limit in one of several regions, as docs/operations.md recommends.
func recipeRegion(share float64) ratelimit.Limit {
	return ratelimit.Define("api", ratelimit.TokenBucket{Rate: 100 * share, Period: time.Second, Capacity: 50 * share})
}

var HalfAndHalf = ratelimit.Define("half", ratelimit.TokenBucket{Rate: 50, Period: time.Minute, Capacity: 50})

var Spaced = ratelimit.Define("spaced",
	ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: ratelimit.None})

var Cooldown = ratelimit.Define("cooldown", ratelimit.TokenBucket{Rate: 1, Period: 30 * time.Second})

func recipeCooldown(ctx context.Context, limiter *ratelimit.Limiter, userID string, publish func(pgx.Tx) error) error {
	return limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := limiter.WithTx(tx).Require(ctx, Cooldown.For(userID)); err != nil {
			return err
		}
		return publish(tx)
	})
}

var (
	LoginAccount = ratelimit.Define("login.account", ratelimit.TokenBucket{Rate: 20, Period: time.Hour, Capacity: 5})
	LoginAddress = ratelimit.Define("login.address", ratelimit.TokenBucket{Rate: 120, Period: time.Hour, Capacity: 30})
)

func recipeLogin(ctx context.Context, limiter *ratelimit.Limiter, account, address string, matches func() bool, admit func(pgx.Tx) error) error {
	// It is committed before the password is verified.
	d, err := limiter.Take(ctx, LoginAccount.For(account), LoginAddress.For(address))
	if err == nil {
		err = d.Err()
	}
	if err != nil {
		return err
	}
	if !matches() { // as slow for an account that does not exist
		return errWrongPassword
	}
	return limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := admit(tx); err != nil {
			return err
		}
		attempts, _ := d.State(LoginAccount)
		used := attempts.Limit.Capacity() - attempts.Remaining // by failures before this attempt, and by itself
		return limiter.WithTx(tx).Credit(ctx, LoginAccount.For(account).Cost(used), LoginAddress.For(address))
	})
}

var (
	SignUpAddress = ratelimit.Define("signUp.address", ratelimit.TokenBucket{Rate: 10, Period: time.Hour, Capacity: 3})
	SignUpsDay    = ratelimit.Define("signUps.day", ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Daily})
)

// WelcomeArgs is a welcome mail.
type WelcomeArgs struct{ Name string }

// Kind names the job.
func (WelcomeArgs) Kind() string { return "welcome" }

func recipeSignUp(ctx context.Context, limiter *ratelimit.Limiter, jobs *river.Client[pgx.Tx], address, name string) error {
	return limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := limiter.WithTx(tx).Require(ctx, SignUpAddress.For(address), SignUpsDay.Global()); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `INSERT INTO users (name) VALUES ($1)`, name); err != nil {
			return err // if the name exists already, the rollback returns both tokens
		}
		_, err := jobs.InsertTx(ctx, tx, WelcomeArgs{Name: name}, nil) // jobs is a *river.Client[pgx.Tx]
		return err
	})
}

var errWrongPassword = errors.New("the login or the password is wrong")

// recipeStart is when the load of a recipe begins.
var recipeStart = time.Date(2026, time.March, 2, 9, 0, 0, 0, time.UTC)

// pressed requests one token of a full bucket at each of n instants, at a rate. It returns the instants of
// admissions, relative to the first.
func pressed(t *testing.T, limit ratelimit.Limit, perSecond float64, n int) (admitted []time.Duration) {
	t.Helper()
	s, err := ratelimit.NewSimulation(ratelimit.Config{})
	require.NoError(t, err)
	for i := range n {
		at := time.Duration(float64(i)/perSecond*1e6) * time.Microsecond
		d, err := s.At(recipeStart.Add(at)).Take(t.Context(), limit.For("ada"))
		require.NoError(t, err)
		if d.Allowed {
			admitted = append(admitted, at)
		}
	}
	return admitted
}

// within returns how many of the instants are before an end.
func within(instants []time.Duration, end time.Duration) (n int) {
	for _, at := range instants {
		if at < end {
			n++
		}
	}
	return n
}

// busiest returns the most instants in any span, wherever it begins.
func busiest(instants []time.Duration, span time.Duration) (most int) {
	first := 0
	for i, at := range instants {
		for ; instants[first] <= at-span; first++ {
		}
		most = max(most, i-first+1)
	}
	return most
}

// recipesPage is docs/recipes.md and docs/slots.md with single spaces.
func recipesPage(t *testing.T) string {
	t.Helper()
	recipes, err := os.ReadFile("../../docs/recipes.md")
	require.NoError(t, err)
	slots, err := os.ReadFile("../../docs/slots.md")
	require.NoError(t, err)
	return strings.Join(strings.Fields(string(recipes)+string(slots)), " ")
}

// says requires one of the pages to give the figures.
func says(t *testing.T, format string, figures ...any) {
	t.Helper()
	said := fmt.Sprintf(format, figures...)
	if !strings.Contains(recipesPage(t), said) {
		require.Fail(t, "docs/recipes.md and docs/slots.md do not say: "+said)
	}
}

// seconds returns an instant as the page writes it.
func inSeconds(d time.Duration) string {
	return strconv.FormatFloat(math.Round(d.Seconds()*1000)/1000, 'f', -1, 64) + " s"
}

// frozen is a limiter, and the instant that it takes for the present.
type frozen struct {
	*world.World

	now time.Time
}

func newFrozen(t *testing.T) *frozen {
	t.Helper()
	f := &frozen{World: world.New(t), now: recipeStart}
	f.Limiter = f.With(t, ratelimit.Config{AsOf: func() time.Time { return f.now }})
	return f
}

// tokens returns what a bucket holds.
func (f *frozen) tokens(t *testing.T, request ratelimit.Request) float64 {
	t.Helper()
	v, err := f.Limiter.Value(t.Context(), request)
	require.NoError(t, err)
	return v.Tokens
}

func TestRecipesOfRates(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)

	t.Run("Regions", func(t *testing.T) {
		t.Parallel()
		whole := pressed(t, recipeRegion(1), 1000, 10*1000)
		larger := pressed(t, recipeRegion(0.6), 1000, 10*1000)
		smaller := pressed(t, recipeRegion(0.4), 1000, 10*1000)
		for end := time.Duration(0); end <= 10*time.Second; end += 100 * time.Millisecond {
			require.LessOrEqual(t, within(larger, end)+within(smaller, end), within(whole, end))
		}
	})

	t.Run("ThirdPartyCap", func(t *testing.T) {
		t.Parallel()
		admitted := pressed(t, HalfAndHalf, 1000, 1000*200)
		most := busiest(admitted, time.Minute)
		require.LessOrEqual(t, most, 100)
		require.Equal(t, 50, within(admitted, 3*time.Minute)-within(admitted, 2*time.Minute))
	})
}

func TestRecipesOfSpacing(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)

	t.Run("Spaced", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		var ready []time.Duration
		for range 8 {
			r, err := f.Limiter.Reserve(t.Context(), Spaced.Global())
			require.NoError(t, err)
			ready = append(ready, r.ReadyAt.Sub(recipeStart))
			f.now = f.now.Add(100 * time.Millisecond)
		}
		for i, at := range ready {
			require.WithinRange(t, recipeStart.Add(at), recipeStart.Add(time.Duration(i+1)*time.Second), recipeStart.Add(time.Duration(i+1)*time.Second+time.Microsecond))
		}
		says(t, "Eight jobs that come within a second run at %s, %s and so on: one a second, the last at %s", inSeconds(ready[0]), inSeconds(ready[1]), inSeconds(ready[7]))
	})

	t.Run("Cooldown", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		publish := func(err error) func(pgx.Tx) error { return func(pgx.Tx) error { return err } }
		invalid := errors.New("the post is empty")
		require.ErrorIs(t, recipeCooldown(t.Context(), f.Limiter, "ada", publish(invalid)), invalid)
		require.NoError(t, recipeCooldown(t.Context(), f.Limiter, "ada", publish(nil)))
		require.NoError(t, recipeCooldown(t.Context(), f.Limiter, "grace", publish(nil)))
		f.now = f.now.Add(12 * time.Second)
		err := recipeCooldown(t.Context(), f.Limiter, "ada", publish(nil))
		var limited *ratelimit.LimitedError
		require.ErrorAs(t, err, &limited)
		says(t, "A caller who retries after 12 s gets a `RetryAfter` of %s", inSeconds(limited.Decision.RetryAfter))
		f.now = f.now.Add(limited.Decision.RetryAfter - time.Microsecond)
		require.ErrorIs(t, recipeCooldown(t.Context(), f.Limiter, "ada", publish(nil)), ratelimit.ErrLimited)
		f.now = f.now.Add(time.Microsecond)
		require.NoError(t, recipeCooldown(t.Context(), f.Limiter, "ada", publish(nil)))
	})

	t.Run("SignUp", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		f.Exec(t, `CREATE TABLE users (name text PRIMARY KEY)`)
		require.NoError(t, scheduler.Migrate(t.Context(), f.Pool, scheduler.MigrateConfig{}))
		jobs, err := river.NewClient(riverpgxv5.New(f.Pool), &river.Config{TestOnly: true})
		require.NoError(t, err)
		signUp := func() error { return recipeSignUp(t.Context(), f.Limiter, jobs, "192.0.2.1", "ada") }
		require.NoError(t, signUp())
		require.Error(t, signUp(), "the name exists")
		queued, err := jobs.JobList(t.Context(), river.NewJobListParams().Kinds("welcome"))
		require.NoError(t, err)
		require.Len(t, queued.Jobs, 1)
		require.Equal(t, 2.0, f.tokens(t, SignUpAddress.For("192.0.2.1")))
		require.Equal(t, 999.0, f.tokens(t, SignUpsDay.Global()))
	})

	t.Run("Login", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		looked := 0
		signIn := func(account string, matches bool) error {
			return recipeLogin(t.Context(), f.Limiter, account, "192.0.2.1", func() bool { looked++; return matches }, func(pgx.Tx) error { return nil })
		}
		for range 20 {
			require.Error(t, signIn("ada", false))
		}
		require.Equal(t, 5, looked)
		err := signIn("ada", true)
		var limited *ratelimit.LimitedError
		require.ErrorAs(t, err, &limited)
		require.Equal(t, 3*time.Minute, limited.Decision.RetryAfter)
		says(t, "Of 20 guesses at the same moment, %d are verified, and the next is possible after %v", looked, "3 min")
		require.NoError(t, signIn("grace", true))
		require.Equal(t, 5.0, f.tokens(t, LoginAccount.For("grace")))
		require.Equal(t, 25.0, f.tokens(t, LoginAddress.For("192.0.2.1")), "the failures stay")
		require.Error(t, signIn("joan", false))
		require.NoError(t, recipeLogin(t.Context(), f.Limiter, "joan", "192.0.2.2", func() bool {
			require.Error(t, signIn("joan", false))
			require.Error(t, signIn("joan", false))
			return true
		}, func(pgx.Tx) error { return nil }))
		require.Equal(t, 3.0, f.tokens(t, LoginAccount.For("joan")), "the failures after the attempt stay, and the one before does not")
	})

	t.Run("LoginUnderAStoredRule", func(t *testing.T) {
		t.Parallel()
		set, err := rules.SetOf(rules.Document{Rules: []rules.Rule{
			{Limit: LoginAccount.Name(), Policy: ratelimit.TokenBucket{Rate: 20, Period: time.Hour, Capacity: 10}},
		}}, nil)
		require.NoError(t, err)
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Policies: set})
		require.NoError(t, err)
		require.NoError(t, recipeLogin(t.Context(), limiter, "ada", "192.0.2.1", func() bool { return true }, func(pgx.Tx) error { return nil }))
	})
}

// The blocks of docs/recipes.md on tenants and hot keys, and the tests that run them.

var (
	Guarantee = ratelimit.Define("guarantee", ratelimit.PerSecond(20))
	Pool      = ratelimit.Define("pool", ratelimit.PerSecond(100))
)

var Firehose = ratelimit.Define("firehose", ratelimit.TokenBucket{
	Rate: 100_000, Period: time.Second, Capacity: 350_000,
})

func recipeHot(limiter *ratelimit.Limiter) (*prefetch.Limiter, error) {
	hot, err := prefetch.New(limiter, prefetch.Config{Limits: prefetch.Limits{Firehose: {For: 500 * time.Millisecond}}})
	return hot, err
}

// callCount counts the calls that the database decided.
type callCount int

func (n *callCount) Observe(_ context.Context, e event.Event) {
	if _, decided := e.(ratelimit.Decided); decided {
		*n++
	}
}

func TestRecipesOfVerbs(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)

	t.Run("Borrow", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		ctx, limiter := t.Context(), f.Limiter
		admitted := func(tenant string) (n int) {
			for ; ; n++ {
				d, err := take.Borrow(ctx, limiter, 1, Guarantee.For(tenant), Pool.Global())
				require.NoError(t, err)
				if !d.Allowed {
					return n
				}
			}
		}
		alone := admitted("acme")
		for _, tenant := range []string{"bolt", "core", "dyne", "echo"} {
			require.Equal(t, 20, admitted(tenant))
		}
		says(t, "A tenant that is alone gets %d at once. Each of four others then still has 20", alone)
		f.now = f.now.Add(time.Second)
		require.Equal(t, 20, admitted("acme"))
	})

	t.Run("HotKey", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			const calls = 100_000
			queries := callCount(0)
			limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Observer: &queries})
			require.NoError(t, err)
			hot, err := recipeHot(limiter)
			require.NoError(t, err)
			for range calls {
				require.NoError(t, hot.Require(t.Context(), Firehose.Global()))
			}
			arrive := 100_000 / 2
			says(t, "At most %d are admitted at once: the capacity, plus the %d that refill in half a second. Only %d of the first %d calls hit the database.",
				int(Firehose.Capacity())+arrive, arrive, queries, calls)
			require.NoError(t, hot.Close(t.Context()))
		})
	})
}
