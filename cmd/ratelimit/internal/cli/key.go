package cli

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// keyView is what the tables have about a key, in all limits.
type keyView struct {
	Key    string          `json:"key"` // as it was asked for; each limit has its stored form
	At     time.Time       `json:"at"`
	Limits []*keyLimitView `json:"limits"`
}

// keyLimitView is what the tables have about a key in one limit.
type keyLimitView struct {
	bucketView
	Refused []keyRefusal `json:"refused"` // empty: nothing is

	stored inspect.Bucket
	isLock bool // of package lockout, whose limits are in the code
}

// keyRefusal is why requests are refused.
type keyRefusal struct {
	OnPlan string    `json:"on_plan,omitzero"` // if the plan of the key is unknown
	Why    string    `json:"why"`
	Until  time.Time `json:"until,omitzero"` // zero: waiting does not help
}

// What the two limits of a lock of package lockout are: the policy of the first, and the end of the name of the second.
const lockPolicy, blocks = "1 per 1ms, no capacity", ".blocks"

// mostLimits is how many limits key looks at.
const mostLimits = 1000

func (a *app) keyCommand() *cobra.Command {
	var f bucketFlags
	var most int
	cmd := a.command(cobra.Command{
		Use:   "key KEY",
		Short: "Show everything about one key, in all limits, and why it is refused",
		Long: `Show each limit in which a key has a bucket, an override, a pause, a reservation or a refusal of the last
hour: its level, policy and plan, and why its requests are refused, and until when. A limit that is not shown is full for
this key.

The plan of a key is known from its last refusal or reservation. If it has none in a limit with rules for plans, the
level on each plan is shown, unless you set --plan or --no-plan. -f has the policies of limits that are only in the code.`,
		Args: oneArgument("a KEY, in quotes if it has spaces"),
		Example: `  ratelimit key acme
  ratelimit key acme --plan pro -o json`,
	}, func(ctx context.Context, args []string) error {
		if err := checkMost(most); err != nil {
			return err
		}
		if args[0] == "" {
			return misused("the key is empty; for the bucket that everybody shares use get LIMIT")
		}
		if f.file != "" {
			if err := f.load(ctx); err != nil {
				return err
			}
		}
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			v, err := a.key(ctx, db, &f, args[0], most)
			if err != nil {
				return err
			}
			return a.show(v, v.fill)
		})
	}, "0 done", "6 the tables have nothing about the key")
	a.withPlan(cmd, &f, "plan of the key; without it, the plan with which it was last seen counts")
	cmd.Flags().IntVarP(&most, "most", "n", 50, "maximum number of limits, up to 1000")
	return a.withOutput(a.withDefinitionFile(cmd, &f.definition))
}

// key reads what the tables have about a key: each kind of fact with one query, and then the level in each limit.
func (a *app) key(ctx context.Context, db *database, f *bucketFlags, key string, most int) (*keyView, error) {
	set, err := a.loadRules(ctx, db)
	if err != nil {
		return nil, err
	}
	facts, err := a.factsOf(ctx, db, f.stored, key)
	if err != nil {
		return nil, err
	}
	names := slices.Sorted(maps.Keys(facts.limits))
	if len(names) == 0 {
		return nil, notFound("the tables have nothing about the key %q: all its buckets are full, or it is misspelt", key)
	}
	if len(names) > most {
		a.note("only the first %d of %d limits are shown; use a larger --most", most, len(names))
		names = names[:most]
	}
	v := &keyView{Key: key, At: facts.list.Now}
	for _, name := range names {
		probe, err := ratelimit.NewLimit(name, ratelimit.PerSecond(1))
		if err != nil {
			return nil, err
		}
		of := facts.limits[name]
		b := &bucket{stored: of.stored.Key, set: set, now: v.At, request: probe.ForStored(of.stored.Key)}
		if err := a.lookAt(ctx, db, of, b, f.definition, facts); err != nil {
			return nil, err
		}
		v.Limits = append(v.Limits, of)
	}
	return v, nil
}

// keyFacts are the facts about a key.
type keyFacts struct {
	list   rules.Listing     // of all keys
	keys   map[string]string // the key as stored in each limit, which may differ
	limits map[string]*keyLimitView
	seen   map[inspect.BucketID]*inspect.Seen
}

// at returns the view of a limit.
func (f *keyFacts) at(name string) *keyLimitView {
	if f.limits[name] == nil {
		f.limits[name] = &keyLimitView{Refused: []keyRefusal{}, stored: inspect.Bucket{Limit: name, Key: f.keys[name]}}
		f.limits[name].Reservations, f.limits[name].Refusals = []inspect.Reservation{}, []inspect.Minute{}
	}
	return f.limits[name]
}

func (a *app) factsOf(ctx context.Context, db *database, stored bool, key string) (f *keyFacts, err error) {
	f = &keyFacts{limits: make(map[string]*keyLimitView)}
	if f.list, err = db.store.List(ctx, rules.ListQuery{}); err != nil {
		return nil, err
	}
	names, err := db.reader.Limits(ctx, "", mostLimits)
	if err != nil {
		return nil, err
	}
	for _, s := range slices.Concat(f.list.Rules, f.list.Overrides, f.list.Pauses) {
		names = append(names, s.Limit)
	}
	slices.Sort(names)
	if names = slices.Compact(names); len(names) >= mostLimits {
		a.note("the tables may have more limits than the %d that are looked at", mostLimits)
		names = names[:mostLimits]
	}
	if f.keys, err = a.storedKeys(ctx, db, stored, key, names); err != nil {
		return nil, err
	}
	places := make([]inspect.Position, len(names))
	for i, name := range names {
		places[i] = inspect.Position{Limit: name, Key: f.keys[name]}
	}
	buckets, err := db.reader.BucketsAt(ctx, places)
	for _, b := range buckets {
		f.at(b.Limit).stored = b
	}
	if err == nil {
		err = a.readUse(ctx, db, f)
	}
	return f, err
}

// readUse reads the refusals, reservations, overrides and pauses.
func (a *app) readUse(ctx context.Context, db *database, f *keyFacts) error {
	keys := slices.Compact(slices.Sorted(maps.Values(f.keys)))
	minutes, _, err := db.reader.RefusalsOfKeys(ctx, keys, f.list.Now.Add(-lately), f.list.Now)
	if err != nil {
		return err
	}
	for _, m := range minutes {
		if f.keys[m.Limit] != "" && !m.Shadow {
			f.at(m.Limit).Refusals = append(f.at(m.Limit).Refusals, m.Minute)
		}
	}
	if f.seen, err = db.seen(ctx, f.list.Now, keys...); err != nil {
		return err
	}
	found, err := db.reader.Reservations(ctx, inspect.ReservationQuery{State: "open", Keys: keys, Most: 1000})
	if err != nil {
		return err
	}
	if found.Next != nil {
		a.note("there are more reservations than are looked at; use reservations list")
	}
	for _, r := range found.List {
		for _, item := range r.Items {
			if item.Key == f.keys[item.Limit] {
				f.at(item.Limit).Reservations = append(f.at(item.Limit).Reservations, r)
			}
		}
	}
	for _, s := range slices.Concat(f.list.Overrides, f.list.Pauses) {
		if s.Key == f.keys[s.Limit] || s.Of == rules.OfPause && s.Key == "" {
			f.at(s.Limit)
		}
	}
	for name, v := range f.limits {
		if other := f.limits[name+blocks]; other != nil && len(other.stored.Rows) > 0 {
			v.isLock = true
			delete(f.limits, name+blocks)
		}
	}
	return nil
}

// lookAt reads the level of a key in one limit, and says why it refuses.
func (a *app) lookAt(ctx context.Context, db *database, v *keyLimitView, b *bucket, d definition, f *keyFacts) error {
	if v.isLock {
		d.policy = lockPolicy
	}
	b, err := a.onPlans(ctx, db, b, d, plansIn(&f.list)[v.stored.Limit])
	if err != nil {
		return err
	}
	seen := f.seen[inspect.BucketID{Limit: v.stored.Limit, Key: v.stored.Key}]
	if err := b.look(ctx, db, &v.bucketView, v.stored, seen); err != nil {
		return err
	}
	v.setStated(&f.list)
	for _, p := range append(v.OnPlans, inspect.PlanLevel{Level: v.Level}) {
		v.explain(p.Plan, p.Level)
	}
	return nil
}

// explain adds why a level refuses a request of one token, or else one that costs as much as those that were refused.
func (v *keyLimitView) explain(plan string, l *inspect.Level) {
	if l == nil {
		return
	}
	why, until := l.Why(min(1, l.Capacity))
	cost, refused := v.refusals()
	switch {
	case why != "" && v.isLock:
		why = "it is locked; ratelimit unlock ends that"
	case why == "" && refused > 0:
		why, until = l.Why(cost / float64(refused))
	}
	if why != "" {
		v.Refused = append(v.Refused, keyRefusal{plan, why, until})
	}
}

func (v *keyView) fill(t *table) {
	t.field("key", keyText(v.Key))
	refused := "by no limit whose policy is known"
	for _, l := range v.Limits {
		for _, r := range l.Refused {
			name, until := l.Limit, "always"
			if r.OnPlan != "" {
				name += ", if it is on plan " + r.OnPlan
			}
			if !r.Until.IsZero() {
				until = "until " + instantFrom(r.Until, v.At)
			}
			t.field("refused", fmt.Sprintf("by %s, %s: %s", name, until, r.Why))
			refused = ""
		}
	}
	t.field("refused", refused)
	t.gap()
	t.row("LIMIT", "PLAN", "LEVEL", "POLICY", "REFUSED", "ALSO")
	for _, l := range v.Limits {
		l.rows(t, v.At)
	}
}

// rows adds a line for the limit, or one for each plan if the plan is unknown.
func (v *keyLimitView) rows(t *table, now time.Time) {
	_, refused := v.refusals()
	var also []string
	if v.Override != nil {
		also = append(also, "override "+v.Override.String())
	}
	if v.Pause != nil {
		until := instantFrom(v.Pause.Until, now)
		also = append(also, fmt.Sprintf("paused until %s by %s: %s", until, v.Pause.Author, v.Pause.Reason))
	}
	if n := len(v.Reservations); n > 0 {
		also = append(also, count(n, "reservation"))
	}
	if n := len(v.Leases); n > 0 {
		also = append(also, count(n, "lease"))
	}
	line := func(plan, level, policy string) {
		t.row(v.Limit, plan, level, policy, fmt.Sprint(refused), dash(strings.Join(also, "; ")))
	}
	plan := dash(seenWords(v.Seen, now))
	switch {
	case v.isLock:
		line(plan, map[bool]string{true: "locked", false: "not locked"}[v.Owed() > 0], "package lockout")
	case v.Level != nil:
		line(plan, levelWords(v.Level), v.Words()+", "+v.DecidedBy)
	case v.OnPlans == nil:
		line(plan, number(v.Stored)+" as stored", "only in the code")
	}
	for _, p := range v.OnPlans {
		if p.Level != nil {
			line(cmp.Or(p.Plan, "none")+"?", levelWords(p.Level), p.Words()+", "+p.DecidedBy)
		}
	}
}
