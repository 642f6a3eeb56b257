package admin

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

const (
	// partTimeout is how long the parts of a page may take.
	partTimeout = 2 * time.Second
	// atOnce is how many connections a page uses at once.
	atOnce = 4
)

// part is what a part of a page shows, or why it cannot.
type part[T any] struct {
	Shows T
	Fault string
}

// gather reads the parts of a page side by side.
type gather struct {
	*visit
	group
	slots chan struct{}
	asked int

	failedMu sync.Mutex
	failed   int
}

// group runs functions side by side. A panic of one goes on where they are waited for: net/http ends a request whose
// handler panics, and a panic anywhere else would end the program.
type group struct {
	running  sync.WaitGroup
	mu       sync.Mutex
	panicked any
}

func (g *group) run(f func()) {
	g.running.Go(func() {
		defer func() {
			if p := recover(); p != nil {
				g.mu.Lock()
				g.panicked = p
				g.mu.Unlock()
			}
		}()
		f()
	})
}

func (g *group) wait() {
	g.running.Wait()
	if g.panicked != nil {
		panic(g.panicked)
	}
}

func (v *visit) gather() *gather { return &gather{visit: v, slots: make(chan struct{}, atOnce)} }

// ask reads a part, which is there once wait has returned. A part that fails takes no other with it.
func ask[T any](g *gather, what string, read func(ctx context.Context) (T, error)) *part[T] {
	p := &part[T]{}
	g.asked++
	g.run(func() {
		ctx, cancel := context.WithTimeout(g.r.Context(), partTimeout)
		defer cancel()
		var err error
		select {
		case g.slots <- struct{}{}:
			defer func() { <-g.slots }()
			p.Shows, err = read(ctx)
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err == nil {
			return
		}
		p.Fault = faultOf(err)
		g.failedMu.Lock()
		g.failed++
		g.failedMu.Unlock()
		if g.r.Context().Err() == nil && !isSaid(err) { // else the visitor is gone, or asked what cannot be
			g.log(what+" could not be read", err)
		}
	})
	return p
}

// isDown reports whether no part could be read.
func (g *gather) isDown() bool { return g.asked > 0 && g.failed == g.asked }

// isSaid reports whether err is about the request, not about the database.
func isSaid(err error) bool {
	return slices.ContainsFunc([]error{
		rules.ErrInvalid, rules.ErrNotFound, inspect.ErrInvalid, ratelimit.ErrInvalidKey, ratelimit.ErrInvalidCost,
		ratelimit.ErrInvalidLimit, ratelimit.ErrInvalidRequest, ratelimit.ErrCostExceedsCapacity, ratelimit.ErrNotReserved,
		ratelimit.ErrReservationEnded,
	}, func(asked error) bool { return errors.Is(err, asked) })
}

// faultOf returns a sentence for the operator: the fault and what to do. It contains nothing of the error's text, which
// is logged.
func faultOf(err error) string {
	switch kind := telemetry.ErrorType(err); {
	case isSaid(err):
		return strings.TrimPrefix(err.Error(), rules.ErrInvalid.Error()+": ")
	case errors.Is(err, errChanged):
		return "This rule has changed since you opened it. Open it again, and make your change there."
	case errors.Is(err, ratelimit.ErrCommitUnknown):
		return "The connection to the database failed during the change."
	case errors.Is(err, ratelimit.ErrNotMigrated), kind == "42P01", kind == "42703", kind == "3F000":
		return "A table, a column or a function is missing. Run migrations.Up of this version, and load the page again."
	case errors.Is(err, ratelimit.ErrHashKeyMismatch):
		return "The keys in the tables are stored under another HashKey than this program has. Give it the HashKey that " +
			"the other programs have."
	case errors.Is(err, ratelimit.ErrPoolerMode):
		return "A pooler in transaction mode loses the statements that this program prepares. Connect with " +
			"default_query_exec_mode=cache_describe."
	case kind == "42501":
		return "The role of this program lacks a privilege. migrations.Grants has the statements that grant it."
	case kind == "timeout", kind == "57014":
		return "The database took longer than 2 seconds. Load the page again. If that does not help, check the load of the " +
			"database."
	case kind == "connection", kind == "closed", kind == "57P01", kind == "57P03", kind == "53300":
		return "The database cannot be reached, so all requests are refused. Check that it runs and accepts connections, " +
			"and load the page again."
	case errors.Is(err, errBusy), errors.Is(err, ratelimit.ErrContended), errors.Is(err, ratelimit.ErrOverloaded),
		kind == "40001", kind == "40P01":
		return "Other transactions used the same rows. Try again."
	}
	return "The database returned an error. It is in the log of the program. Correct it, and load the page again."
}
