package ratelimit_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Limits are package variables: a misspelt one does not compile.
var (
	FailedLogins = ratelimit.Define("failedLogins", ratelimit.PerHour(10))
	SendMessage  = ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
	FreeTrials   = ratelimit.Define("freeTrials", ratelimit.FixedWindow{Rate: 100, Period: time.Hour})
	Exports      = ratelimit.Define("exports", ratelimit.Concurrency{Slots: 3, Lease: 30 * time.Second})
	Renders      = ratelimit.Define("renders", ratelimit.Concurrency{Slots: 5, Lease: 30 * time.Second})
	Completions  = ratelimit.Define("completions", ratelimit.TokenBucket{Rate: 40_000, Period: time.Minute, MaxReserved: 400_000})
)

// Variables of a program that the examples use.
var (
	ctx     = context.Background()
	limiter *ratelimit.Limiter
	userID  string
)

func ExampleNew() {
	pool, err := pgxpool.New(ctx, "postgres://localhost/app")
	if err != nil {
		log.Fatal(err)
	}
	if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		log.Fatal(err)
	}
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	if err != nil {
		log.Fatal(err)
	}
	d, err := limiter.Take(ctx, SendMessage.For("user 17"))
	fmt.Println(d.Allowed, err)
}

// A page shows the wait before the caller queues.
func ExampleLimiter_CheckReserve() {
	r, err := limiter.CheckReserve(ctx, Completions.For(userID).Cost(1500))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("it would begin in", r.Delay())
}

// A limit of each kind.
func ExampleDefine() {
	for _, limit := range []ratelimit.Limit{
		ratelimit.Define("messages", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3}),
		ratelimit.Define("visits", ratelimit.FixedWindow{Rate: 1000, Period: ratelimit.Day, Start: time.Date(2026, time.January, 1, 0, 0, 0, 0, time.UTC)}),
		ratelimit.Define("partner", ratelimit.SlidingWindow{Rate: 100, Period: time.Minute}),
		ratelimit.Define("quota", ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"}),
		ratelimit.Define("exports", ratelimit.Concurrency{Slots: 3, Lease: 30 * time.Second}),
	} {
		fmt.Println(limit)
	}
	// Output:
	// messages: 10 per minute, capacity 3
	// visits: 1000 per day (fixed window, one starts at 2026-01-01T00:00:00Z)
	// partner: never more than 100 in any minute
	// quota: 1000 per month in Europe/Berlin
	// exports: 3 at a time, leases of 30s
}

func ExampleLimiter_Take() {
	d, err := limiter.Take(ctx, SendMessage.For(userID))
	switch {
	case err != nil: // no decision was made: treat the request as refused
		log.Print(err)
	case !d.Allowed:
		log.Printf("come again in %v", d.RetryAfter)
	default:
		log.Printf("%.0f left", d.Remaining)
	}
}

// A slot is held while the work runs. The storage compares fencing numbers, so a result does not replace the result of
// a later lease.
func ExampleLimiter_Acquire() {
	lease, err := limiter.Acquire(ctx, Renders.For(userID))
	switch {
	case err != nil: // no decision was made
		log.Print(err)
		return
	case !lease.Allowed:
		log.Printf("come again in %v at the latest", lease.RetryAfter)
		return
	}
	var pool *pgxpool.Pool // the work takes less than the lease; Hold renews it
	_, err = pool.Exec(ctx, `UPDATE videos SET frames = $1, fence = $2 WHERE owner = $3 AND fence <= $2`, "..", lease.Fence, userID)
	if err := errors.Join(err, limiter.Release(ctx, lease.ID)); errors.Is(err, ratelimit.ErrLeaseLost) {
		log.Print("the work ran beside others for a while")
	}
}

// The tokens belong to the transaction: the message and its token commit together, or neither does.
func ExampleLimiter_InTx() {
	err := limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := limiter.WithTx(tx).Require(ctx, SendMessage.For(userID)); err != nil {
			return err // rolls back
		}
		_, err := tx.Exec(ctx, `INSERT INTO messages (author, body) VALUES ($1, $2)`, userID, "hello")
		return err
	})
	var limited *ratelimit.LimitedError
	if errors.As(err, &limited) {
		log.Printf("come again in %v", limited.Decision.RetryAfter)
	}
}

// If you begin the transaction yourself, run it again when it conflicts.
func ExampleLimiter_WithTx() {
	var pool *pgxpool.Pool
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		return limiter.WithTx(tx).Require(ctx, FreeTrials.Global())
	})
	if ratelimit.IsRetryable(err) {
		log.Print("again, from the start")
	}
}

// Work that will be done in any case reserves its tokens, and runs when they are available.
func ExampleLimiter_Reserve() {
	r, err := limiter.Reserve(ctx, Completions.Global().Cost(2500))
	if err != nil {
		log.Fatal(err)
	}
	if !r.Allowed {
		log.Printf("too much is waiting already: come again in %v", r.RetryAfter)
		return
	}
	time.AfterFunc(r.Delay(), func() { log.Print("run the completion") })
}

// A form may show whether it will be accepted. What counts is the answer to Take.
func ExampleLimiter_Check() {
	d, err := limiter.Check(ctx, SendMessage.For(userID))
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("enabled: %v", d.Allowed)
}

// One Value predicts the tokens of a bucket, so that a page can count down without another call.
func ExampleLimiter_Value() {
	value, err := limiter.Value(ctx, SendMessage.For(userID))
	if err != nil {
		log.Fatal(err)
	}
	for s := range 10 {
		log.Printf("in %d s: %.1f", s, value.At(value.AsOf.Add(time.Duration(s)*time.Second)))
	}
}

// After a correct password the earlier attempts were not guesses.
func ExampleLimiter_Reset() {
	if err := limiter.Reset(ctx, FailedLogins.For(userID)); err != nil {
		log.Fatal(err)
	}
}

// Do the work only if Require returns nil.
func ExampleLimiter_Require() {
	err := limiter.Require(ctx, SendMessage.For(userID), FreeTrials.Global())
	var refused *ratelimit.LimitedError
	switch {
	case errors.As(err, &refused):
		log.Printf("come again in %v", refused.Decision.RetryAfter)
	case err != nil:
		log.Printf("nobody could say: %v", err) // and so it is not sent
	default:
		log.Print("send it")
	}
}

// No user has more than three exports running at a time. The storage that they write to compares the fencing number.
func ExampleLimiter_Hold() {
	export := func(context.Context, ratelimit.Lease) error { return nil }
	err := limiter.Hold(ctx, export, Exports.For(userID))
	switch {
	case errors.Is(err, ratelimit.ErrLimited):
		fmt.Println("three are running already")
	case errors.Is(err, ratelimit.ErrLeaseLost):
		fmt.Println("it was stopped, because its slot may be somebody else's")
	case err != nil:
		log.Fatal(err)
	}
}

// Acquire the lease in the transaction that stores the work, and call KeepAlive after the commit.
func ExampleLimiter_KeepAlive() {
	var lease ratelimit.Lease
	err := limiter.InTx(ctx, func(tx pgx.Tx) (err error) {
		if lease, err = limiter.WithTx(tx).Acquire(ctx, Exports.For(userID)); err != nil || !lease.Allowed {
			return cmp.Or(err, lease.Err())
		}
		_, err = tx.Exec(ctx, "INSERT INTO exports ...")
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	held, release := limiter.KeepAlive(ctx, lease)
	defer release()
	<-held.Done() // the work, which stops when this ends
}

// The reservation was an estimate. Settle charges the real cost.
func ExampleLimiter_Settle() {
	var reservation string // the ID of a Reservation
	used := 1830.0
	if err := limiter.Settle(ctx, reservation, Completions.Global().Cost(used)); err != nil {
		log.Fatal(err)
	}
}

// If the work is not done, Cancel returns the reserved tokens.
func ExampleLimiter_Cancel() {
	var reservation string
	if err := limiter.Cancel(ctx, reservation); err != nil {
		log.Fatal(err)
	}
}

// Work that a timer started asks whether its moment has come, on the database's clock.
func ExampleLimiter_Start() {
	var reservation string
	slot, err := limiter.Start(ctx, reservation)
	if err != nil {
		log.Fatal(err)
	}
	if slot.Wait > 0 {
		log.Printf("early, or the slot has moved: again in %v", slot.Wait)
		return
	}
	log.Print("run the completion")
}

// Work that was started and not settled may have used the upstream. After a crash, check that before you return its
// tokens.
func ExampleLimiter_Started() {
	var reservation string
	started, err := limiter.Started(ctx, reservation)
	switch {
	case err != nil:
		log.Print(err)
	case started:
		err = limiter.Settle(ctx, reservation) // without requests it charges the reserved cost
	default:
		err = limiter.Cancel(ctx, reservation)
	}
	if err != nil {
		log.Print(err)
	}
}

// A retry that uses the upstream again pays again, and waits for its turn.
func ExampleLimiter_Renew() {
	var reservation string
	slot, err := limiter.Renew(ctx, reservation)
	if err != nil {
		log.Fatal(err)
	}
	time.AfterFunc(slot.Wait, func() { log.Print("try the completion again") })
}

// A queue of your own keeps the requests of each job, so that a job can start although its reservation is gone.
func ExampleLimiter_MarshalRequests() {
	written, err := limiter.MarshalRequests(SendMessage.For("ada").Cost(2))
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("keep this with the job: %s", written)
}

// An upstream has said when it answers again, and every worker that hears it charges until then.
func ExampleLimiter_ChargeUntil() {
	end, err := limiter.ChargeUntil(ctx, time.Now().Add(time.Minute), SendMessage.For("ada"))
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("ada can send again at %v", end)
}

// A worker of a queue of its own starts a job whose reservation is perhaps gone.
func ExampleLimiter_UnmarshalRequests() {
	var reservation string
	var written []byte // as MarshalRequests returned them
	requests, err := limiter.UnmarshalRequests(written)
	if err != nil {
		log.Fatal(err)
	}
	turn, err := limiter.Start(ctx, reservation, requests...)
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("the job may run in %v", turn.Wait)
}

// One process or several end the reservations that were neither settled nor cancelled.
func ExampleLimiter_Expire() {
	for range time.Tick(time.Minute) {
		ended, err := limiter.Expire(ctx)
		if err != nil {
			log.Print(err)
		}
		log.Printf("%d reservations had been left open", ended)
	}
}

// A program deletes rows of idle keys, and ends expired reservations, in the background.
func ExampleLimiter_Maintain() {
	go func() { log.Print(limiter.Maintain(ctx, 10*time.Minute, SendMessage, FailedLogins, FreeTrials)) }()
}

// Buckets that are full need no row.
func ExampleLimiter_Prune() {
	deleted, err := limiter.Prune(ctx, SendMessage, FailedLogins, FreeTrials)
	if err != nil {
		log.Print(err)
	}
	log.Printf("%d rows of keys that nobody uses", deleted)
}

// A user bought more.
func ExampleLimiter_Credit() {
	if err := limiter.Credit(ctx, Completions.For(userID).Cost(10_000)); err != nil {
		log.Fatal(err)
	}
}

// If the work cannot be done, its tokens go back as of the instant of the decision.
func ExampleLimiter_CreditTaken() {
	d, err := limiter.Take(ctx, FreeTrials.Global())
	if err != nil {
		log.Fatal(err)
	}
	started := false
	if d.Allowed && !started {
		log.Print(limiter.CreditTaken(ctx, d.At, FreeTrials.Global()))
	}
}

// The real cost of a stream is known at its end.
func ExampleLimiter_Charge() {
	sent := 4_096.0
	if err := limiter.Charge(ctx, Completions.For(userID).Cost(sent)); err != nil {
		log.Fatal(err)
	}
}

// Renew a lease from Acquire before it ends, and release it. Hold and KeepAlive do so by themselves.
func ExampleLimiter_RenewLease() {
	var id string // the ID of a Lease
	for range 10 {
		log.Print("export some rows")
		renewed, err := limiter.RenewLease(ctx, id)
		if err != nil { // ErrLeaseLost: another holder may have the slot by now
			log.Print(err)
			return
		}
		log.Printf("ours until %v", renewed.Until)
	}
	log.Print(limiter.Release(ctx, id))
}

// A slot is free as soon as its work has ended.
func ExampleLimiter_Release() {
	var lease ratelimit.Lease
	if err := limiter.Release(ctx, lease.ID); errors.Is(err, ratelimit.ErrLeaseLost) {
		log.Print("it took longer than the lease: others may have done the same")
	}
}

// At its end a program first waits for calls in progress with Close, and then closes its pool.
func ExampleLimiter_Close() {
	log.Print(limiter.Close(ctx))
}

// A page shows the policy in effect, which may come from a rule.
func ExampleLimiter_Resolve() {
	fmt.Println(limiter.Resolve(SendMessage.For(userID).Plan("pro")))
}

// A guard allows a request without a key if its limit is not enforced.
func ExampleLimiter_Mode() {
	if limiter.Mode(SendMessage.Global()) != ratelimit.On {
		fmt.Println("in shadow, or off")
	}
}

// A guard of your own reports its answers to the Observer, as httplimit and grpclimit do.
func ExampleLimiter_Observe() {
	err := limiter.Require(ctx, SendMessage.For(userID))
	answered := event.Answered{Route: "chat", Limit: SendMessage.Name(), Result: "allowed", Err: err}
	switch {
	case errors.Is(err, ratelimit.ErrLimited):
		answered.Result = "refused"
	case err != nil:
		answered.Result = "failed_closed"
	}
	limiter.Observe(ctx, answered)
}

// An override of one key names the stored form of the key.
func ExampleLimiter_StoredKey() {
	stored, err := limiter.StoredKey(SendMessage.For(userID))
	if err != nil {
		log.Fatal(err)
	}
	log.Print(stored)
}

// A transaction that reads before it takes names its bucket, so that it runs only once.
func ExampleWithQueue() {
	err := limiter.InTx(ratelimit.WithQueue(ctx, FreeTrials.Global()), func(tx pgx.Tx) error {
		var left int
		if err := tx.QueryRow(ctx, `SELECT places FROM trials`).Scan(&left); err != nil {
			return err
		}
		return limiter.WithTx(tx).Require(ctx, FreeTrials.Global())
	})
	if err != nil {
		log.Print(err)
	}
}

// Different parts give different keys.
func ExampleJoin() {
	fmt.Println(ratelimit.Join("acme", ratelimit.ID(42)))
	fmt.Println(ratelimit.Join("a|b", "c"))
	fmt.Printf("%q\n", ratelimit.Join("acme", ratelimit.ID(0))) // which every call refuses
	// Output:
	// acme|42
	// a\|b|c
	// ""
}

// TestEveryVerbHasAnExample promises that go doc shows how to call each method of a Limiter, and that docs/guide.md
// names it. Methods that only return a property of the Limiter are exempt.
func TestEveryVerbHasAnExample(t *testing.T) {
	t.Parallel()
	tells := []string{"HasPolicies", "InTransaction", "Schema"}
	page, err := os.ReadFile("../docs/guide.md")
	require.NoError(t, err)
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	var verbs, examples []string
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			switch {
			case !ok:
			case f.Recv == nil:
				examples = append(examples, f.Name.Name)
			case f.Name.IsExported() && !strings.HasSuffix(name, "_test.go"):
				if star, ok := f.Recv.List[0].Type.(*ast.StarExpr); ok && star.X.(*ast.Ident).Name == "Limiter" {
					verbs = append(verbs, f.Name.Name)
				}
			}
		}
	}
	require.NotEmpty(t, verbs)
	for _, verb := range verbs {
		if !slices.Contains(tells, verb) {
			require.Contains(t, examples, "ExampleLimiter_"+verb)
			require.Regexp(t, "(?m)^\\| .*`"+verb+"\\b", string(page))
		}
	}
}
