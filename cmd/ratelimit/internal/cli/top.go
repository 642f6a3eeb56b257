package cli

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// topFlags say what top looks for.
type topFlags struct {
	by, group, limit string
	since            spanFlag
	shadow           bool
	most, look       int
}

// check checks the values whose errors would otherwise not name the flags.
func (f *topFlags) check() error {
	switch refusals.By(f.group) {
	case refusals.ByLimit, refusals.ByRoute, refusals.ByKey:
	default:
		return misused("--group is %.40q; use limit, route or key", f.group)
	}
	switch {
	case f.look < 1 || f.look > 1_000_000:
		return misused("--look is %d; use 1 to 1000000", f.look)
	case time.Duration(f.since) > 1000*ratelimit.Day:
		return misused("--since is %s; use up to 1000d", words.Period(time.Duration(f.since)))
	}
	return checkMost(f.most)
}

func (a *app) topCommand() *cobra.Command {
	f := topFlags{since: spanFlag(lately)}
	cmd := a.command(cobra.Command{
		Use:   "top",
		Short: "Show the keys with the most refusals, requests, owed tokens or reservations",
		Long: `Show the limits, routes or keys with the most refusals or allowed requests (if programs count them with package refusals), or
the buckets with the most owed or reserved tokens. It reads a bounded number of rows, and notes if there are more.

The owed tokens of now depend on the policy in the tables. If there is none, or if the limit has rules for plans, it shows the
owed tokens at the last change of the bucket, because no row has the plan of its key.`,
		Args: noArguments,
		Example: `  ratelimit top --group key --since 15m
  ratelimit top --by allowed --group key
  ratelimit top --by owed --limit completions`,
	}, func(ctx context.Context, _ []string) error {
		if err := f.check(); err != nil {
			return err
		}
		show, ok := map[string]func(context.Context, *database, *topFlags) error{
			"refusals": a.topRefusals, "allowed": a.topAllowed, "owed": a.topOwing, "reservations": a.topReservations,
		}[f.by]
		if !ok {
			return misused("--by is %.40q; use refusals, allowed, owed or reservations", f.by)
		}
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error { return show(ctx, db, &f) })
	})
	flags := cmd.Flags()
	flags.StringVar(&f.by, "by", "refusals", "refusals, allowed (which keys take most), owed or reservations")
	flags.StringVar(&f.group, "group", string(refusals.ByLimit), "group refusals or allowed requests by limit, route or "+
		"key")
	flags.StringVar(&f.limit, "limit", "", "only this limit")
	flags.Var(&f.since, "since", "age of the oldest refusals, up to 1000d")
	flags.BoolVar(&f.shadow, "shadow", false, "show the refusals of limits in shadow")
	flags.IntVarP(&f.most, "most", "n", 10, "maximum number of lines, up to 1000")
	flags.IntVar(&f.look, "look", 100_000, "maximum number of rows to read, for owed and reservations")
	return a.withOutput(cmd)
}

// sumView is a sum of refusals in JSON and YAML.
type sumView struct {
	Limit   string    `json:"limit"`
	Route   string    `json:"route,omitzero"`
	Key     string    `json:"key,omitzero"` // as stored
	Refused int64     `json:"refused"`
	Cost    float64   `json:"cost"`
	Last    time.Time `json:"last"`
}

// topSums reads the sums that the flags ask for, and what time it is.
func (a *app) topSums(ctx context.Context, db *database, f *topFlags,
	isAllowed bool,
) (sums []refusals.Sum, now time.Time, err error) {
	if now, err = db.reader.Now(ctx); err != nil {
		return nil, now, err
	}
	asked := now.Add(-time.Duration(f.since))
	sums, since, err := db.reader.TopRefused(ctx, refusals.TopConfig{
		Since: asked, By: refusals.By(f.group), Limit: f.limit, Shadow: f.shadow, Allowed: isAllowed, Most: f.most,
	})
	if err == nil && since.After(asked) {
		a.note("there are too many counts; these are only since %s", instantFrom(since, now))
	}
	return sums, now, err
}

// takerView is a sum of allowed requests in JSON and YAML.
type takerView struct {
	Limit   string `json:"limit"`
	Key     string `json:"key,omitzero"` // as stored
	Allowed int64  `json:"allowed"`
}

func (a *app) topAllowed(ctx context.Context, db *database, f *topFlags) error {
	if f.group == string(refusals.ByRoute) || f.shadow {
		return misused("allowed requests are counted without routes and shadow; use --group limit or --group key")
	}
	sums, _, err := a.topSums(ctx, db, f, true)
	if err != nil {
		return err
	}
	views := make([]takerView, len(sums))
	for i, s := range sums {
		views[i] = takerView{s.Limit, s.Key, s.Allowed}
	}
	none := "no allowed requests are counted in the last " + words.Period(time.Duration(f.since)) +
		"; programs count with package refusals"
	return showList(a, views, none, []string{"LIMIT", "KEY", "ALLOWED"}, func(v *takerView) []string {
		what := dash("")
		switch {
		case v.Key != "":
			what = keyText(v.Key)
		case f.group == string(refusals.ByKey):
			what = othersWords
		}
		return []string{v.Limit, what, fmt.Sprint(v.Allowed)}
	})
}

// othersWords stand for the row of a limit that has no key.
const othersWords = "(shared, and keys not told apart)"

func (a *app) topRefusals(ctx context.Context, db *database, f *topFlags) error {
	sums, now, err := a.topSums(ctx, db, f, false)
	if err != nil {
		return err
	}
	views := make([]sumView, len(sums))
	for i, s := range sums {
		views[i] = sumView{s.Limit, s.Route, s.Key, s.Refused, s.Cost, s.Last}
	}
	column := "ROUTE"
	if f.group == string(refusals.ByKey) {
		column = "KEY"
	}
	none := "nothing is counted as refused in the last " + words.Period(time.Duration(f.since)) +
		"; programs count with package refusals"
	return showList(a, views, none, []string{"LIMIT", column, "REFUSED", "COST", "LAST"}, func(v *sumView) []string {
		what := dash(v.Route)
		switch {
		case f.group == string(refusals.ByKey) && v.Key == "":
			what = othersWords
		case f.group == string(refusals.ByKey):
			what = keyText(v.Key)
		}
		return []string{v.Limit, what, fmt.Sprint(v.Refused), number(v.Cost), instantFrom(v.Last, now)}
	})
}

func (a *app) topOwing(ctx context.Context, db *database, f *topFlags) error {
	found, more, err := owing(ctx, db, f)
	if err != nil {
		return err
	}
	if more {
		a.note("only the first %d rows were read; use a larger --look, or --limit", f.look)
	}
	now, err := db.reader.Now(ctx)
	if err != nil {
		return err
	}
	views, err := a.owingViews(ctx, db, found, now)
	if err != nil {
		return err
	}
	views = slices.DeleteFunc(views, func(v inspect.View) bool { return v.Owed() == 0 })
	slices.SortStableFunc(views, func(a, b inspect.View) int { return cmp.Compare(b.Owed(), a.Owed()) })
	views = views[:min(len(views), f.most)]
	return showList(a, views, "no bucket owes anything", []string{"LIMIT", "KEY", "OWED", "AT", "FREE AT"},
		func(v *inspect.View) []string {
			at, free := instantFrom(v.At, now)+", as stored", "-"
			if v.Level != nil {
				at, free = "now", dash(instantFrom(v.FreeAt, now))
			}
			return []string{v.Limit, keyText(v.Key), number(v.Owed()), at, free}
		})
}

// owing returns the buckets that owe, as far as it may look.
func owing(ctx context.Context, db *database, f *topFlags) (found []inspect.Bucket, more bool, err error) {
	const most = 1000 // of which each is projected by itself
	page, err := db.reader.Owing(ctx, inspect.OwingQuery{Limit: f.limit, Look: f.look, Most: most})
	return page.Buckets, page.Next != nil, err
}

// owingViews returns buckets with their levels if the tables give their policies for every plan.
func (a *app) owingViews(ctx context.Context, db *database, found []inspect.Bucket,
	now time.Time,
) ([]inspect.View, error) {
	limiter, set, err := a.limiter(ctx, db)
	if err != nil {
		return nil, err
	}
	list, err := db.store.List(ctx, rules.ListQuery{})
	if err != nil {
		return nil, err
	}
	limits := make(map[rules.Bucket]ratelimit.Limit, len(found))
	for _, b := range found {
		limit, err := db.limitOnAnyPlan(set, b, now, inspect.PlansOf(b.Limit, list.Rules))
		if err != nil {
			return nil, err
		}
		limits[rules.Bucket{Limit: b.Limit, Key: b.Key}] = limit
	}
	return inspect.Views(ctx, limiter, found, func(b inspect.Bucket) (ratelimit.Limit, []string) {
		return limits[rules.Bucket{Limit: b.Limit, Key: b.Key}], nil
	}, nil)
}

// limitOnAnyPlan returns the limit of a bucket if the tables decide, by the same policy on every plan, and else the
// zero Limit.
func (db *database) limitOnAnyPlan(set *rules.Set, stored inspect.Bucket, now time.Time,
	plans []string,
) (limit ratelimit.Limit, err error) {
	b := &bucket{stored: stored.Key, now: now, set: set}
	policy, alone, err := standsAlone(db, b, stored.Limit, "")
	if err != nil || !alone {
		return limit, err
	}
	for _, plan := range plans {
		if other, _, err := standsAlone(db, b, stored.Limit, plan); err != nil || other != policy {
			return limit, err
		}
	}
	return ratelimit.NewLimit(stored.Limit, policy)
}

// reservedView is the sum of a bucket's open reservations in JSON and YAML.
type reservedView struct {
	Limit        string  `json:"limit"`
	Key          string  `json:"key"` // as stored
	Reservations int     `json:"reservations"`
	Cost         float64 `json:"cost"`
	Waiting      int     `json:"waiting"` // how many are not ready
}

func (a *app) topReservations(ctx context.Context, db *database, f *topFlags) error {
	query := inspect.ReservationQuery{State: "open", Limit: f.limit, Most: 1000}
	now, err := db.reader.Now(ctx)
	if err != nil {
		return err
	}
	sums := make(map[rules.Bucket]*reservedView)
	looked := 0
	for {
		page, err := db.reader.Reservations(ctx, query)
		if err != nil {
			return err
		}
		for i := range page.List {
			sumUp(sums, &page.List[i], now, f.limit)
		}
		looked += len(page.List)
		if query.After = page.Next; query.After == nil {
			break
		}
		if looked >= f.look {
			a.note("only the first %d open reservations were read; use a larger --look, or --limit", looked)
			break
		}
	}
	views := make([]reservedView, 0, len(sums))
	for _, v := range sums {
		views = append(views, *v)
	}
	slices.SortFunc(views, func(a, b reservedView) int {
		return cmp.Or(cmp.Compare(b.Cost, a.Cost), cmp.Compare(a.Limit, b.Limit), cmp.Compare(a.Key, b.Key))
	})
	views = views[:min(len(views), f.most)]
	return showList(a, views, "nothing is reserved", []string{"LIMIT", "KEY", "RESERVED", "RESERVATIONS", "WAITING"},
		func(v *reservedView) []string {
			return []string{v.Limit, keyText(v.Key), number(v.Cost), fmt.Sprint(v.Reservations), fmt.Sprint(v.Waiting)}
		})
}

// sumUp adds an open reservation to its buckets. If limit is not empty, it skips the buckets of other limits.
func sumUp(sums map[rules.Bucket]*reservedView, r *inspect.Reservation, now time.Time, limit string) {
	for _, item := range r.Items {
		if limit != "" && item.Limit != limit {
			continue
		}
		id := rules.Bucket{Limit: item.Limit, Key: item.Key}
		if sums[id] == nil {
			sums[id] = &reservedView{Limit: item.Limit, Key: item.Key}
		}
		sums[id].Reservations++
		sums[id].Cost += item.Cost
		if r.ReadyAt.After(now) {
			sums[id].Waiting++
		}
	}
}
