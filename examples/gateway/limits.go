package main

import (
	"bytes"
	"context"
	_ "embed"
	"net/http"
	"strconv"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// rulesFile is what the tables begin with: all limits, and of which requests they are asked.
//
//go:embed rules.yaml
var rulesFile []byte

// perKey is the limit of which callers are told what is left. Its policies are in the tables, by plan; this one decides
// for a plan that has none there.
var perKey = ratelimit.Define("gateway.key", ratelimit.PerMinute(60))

// begin puts into the tables what rulesFile says, unless somebody has changed them before: what an operator has stated
// stays when a gateway starts again. It holds at once, as no gateway has decided anything yet.
func begin(ctx context.Context, pool *pgxpool.Pool) error {
	store, err := rules.NewStore(pool, rules.StoreConfig{Lead: -1})
	if err != nil {
		return err
	}
	listing, err := store.List(ctx)
	if err != nil || listing.Version > 0 {
		return err
	}
	file, err := rules.Read(bytes.NewReader(rulesFile))
	if err != nil {
		return err
	}
	_, err = store.Apply(ctx, rules.Edit{Author: "gateway", Reason: "what rules.yaml says"}, rules.Changes{Put: file.Rules, Tiers: &file.Tiers})
	return err
}

// loadRules returns what the tables say of limits, which begin with what rulesFile says.
func loadRules(ctx context.Context, pool *pgxpool.Pool, observer ratelimit.Observer) (*rules.Set, error) {
	if err := begin(ctx, pool); err != nil {
		return nil, err
	}
	set, err := rules.NewSet(pool, rules.Config{Observer: observer})
	if err != nil {
		return nil, err
	}
	return set, set.Load(ctx)
}

// whileUpToDate calls do while the gateway hears of changes of its limits, and writes down what it refuses.
func (g *gateway) whileUpToDate(ctx context.Context, do func() error) error {
	ctx, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { _ = g.set.Run(ctx) }) // its error is that of ctx
	running.Go(func() {
		if err := g.refusals.Run(ctx); err != nil {
			g.log.Warn("the last refusals are not written", "error", err)
		}
	})
	defer running.Wait()
	defer stop()
	return do()
}

// attributes says what the tiers may ask of a request.
func (g *gateway) attributes(r *http.Request) (a rules.Attributes, err error) {
	who := identityOf(r.Context())
	a = rules.Attributes{Plan: who.plan, Endpoint: r.Pattern}
	if a.Address, err = g.address(r); err != nil || who.stranger {
		return a, err
	}
	a.User, err = g.caller(r)
	return a, err
}

// What a request may state to cost, in the header that names it.
const (
	costHeader = "X-Tokens"
	maxCost    = 100
)

// stateCost has every request state what it is charged, which tiers take as it stands: 1 where it states nothing, and the
// most where it states too much.
func stateCost(next http.Handler) http.Handler {
	cost := httplimit.StatedCost{Header: costHeader, Max: maxCost}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tokens, _ := cost.Of(r) // it rejects nothing
		r = r.Clone(r.Context())
		r.Header.Set(costHeader, strconv.FormatFloat(tokens, 'f', -1, 64))
		next.ServeHTTP(w, r)
	})
}
