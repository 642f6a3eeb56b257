package ratelimit_test

import (
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
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

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

// Work that was started and not settled may have used the upstream. After a crash, check that before you return its tokens.
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
	if d.Allowed && errors.Is(startTrial(), errNoSpace) {
		if err := limiter.CreditTaken(ctx, d.At, FreeTrials.Global()); err != nil {
			log.Print(err)
		}
	}
}

var errNoSpace = errors.New("no space")

func startTrial() error { return nil }

// The real cost of a stream is known at its end.
func ExampleLimiter_Charge() {
	sent := 4_096.0
	if err := limiter.Charge(ctx, Completions.For(userID).Cost(sent)); err != nil {
		log.Fatal(err)
	}
}

// Renew a lease from Acquire before it ends, and release it. Hold and Keep do so by themselves.
func ExampleLimiter_RenewLease() {
	lease, err := limiter.Acquire(ctx, Exports.For(userID))
	if err != nil {
		log.Fatal(err)
	}
	if !lease.Allowed {
		return
	}
	for more := true; more; {
		more = exportSomeRows()
		renewed, err := limiter.RenewLease(ctx, lease.ID)
		if err != nil { // ErrLeaseLost: another holder may have the slot by now
			log.Print(err)
			return
		}
		log.Printf("ours until %v", renewed.Until)
	}
	if err := limiter.Release(ctx, lease.ID); err != nil {
		log.Print(err)
	}
}

func exportSomeRows() (more bool) { return false }

// A slot is free as soon as its work has ended.
func ExampleLimiter_Release() {
	var lease ratelimit.Lease
	if err := limiter.Release(ctx, lease.ID); errors.Is(err, ratelimit.ErrLeaseLost) {
		log.Print("it took longer than the lease: others may have done the same")
	}
}

// An upstream answered 429. From now on all processes send fewer requests to it.
func ExampleLimiter_Report() {
	upstream := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerSecond(100), Apply: true})
	err := limiter.Report(ctx, upstream.For("account"), ratelimit.Outcome{Throttled: true, RetryAfter: 2 * time.Second})
	if err != nil {
		log.Print(err)
	}
}

// At its end a program first waits for calls in progress with Close, and then closes its pool.
func ExampleLimiter_Close() {
	if err := limiter.Close(ctx); err != nil {
		log.Print(err)
	}
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
	answered := ratelimit.Answered{Route: "chat", Limit: SendMessage.Name(), Result: "allowed", Err: err}
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

// TestEveryVerbHasAnExample promises that go doc shows how to call each method of a Limiter, and that docs/guide.md names it.
// Methods that only return a property of the Limiter are exempt.
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
