package cli

import (
	"cmp"
	"context"
	"fmt"
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
	inspect.Use
	Refused []inspect.Refusal `json:"refused"` // empty: nothing is

	isLock bool // of package lockout, whose limits are in the code
}

// What the two limits of a lock of package lockout are: the policy of the first, and the end of the name of the second.
const lockPolicy, blocks = "rate: 1, period: 1ms, capacity: 0", ".blocks"

func (a *app) keyCommand() *cobra.Command {
	var f bucketFlags
	var most int
	cmd := a.command(cobra.Command{
		Use:   "key KEY",
		Short: "Show everything about one key, in all limits, and why it is refused",
		Long: `Show each limit where a key has a bucket, an override, a pause, a reservation or a counted request in the
last day: its level, policy and plan, why its requests are refused, and until when. In a limit that isn't
shown, the key's bucket is full.

The plan is the one in the key's last refusal or reservation. If it has none, and the limit has rules for plans, you
see the level on each plan, unless you set --plan or --no-plan.`,
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
	return a.withOutput(cmd)
}

// key reads what the tables have about a key, and then its level in each limit.
func (a *app) key(ctx context.Context, db *database, f *bucketFlags, key string, most int) (*keyView, error) {
	set, err := a.loadRules(ctx, db)
	if err != nil {
		return nil, err
	}
	keyOf, err := a.keyOf(ctx, db, f.stored, key)
	if err != nil {
		return nil, err
	}
	list, err := db.store.List(ctx, rules.ListQuery{})
	if err != nil {
		return nil, err
	}
	found, err := db.reader.Key(ctx, inspect.KeyQuery{
		KeyOf: keyOf, List: &list, Since: list.Now.Add(-lately), Until: list.Now, Most: 1000,
	})
	if err != nil {
		return nil, err
	}
	v := &keyView{Key: key, At: list.Now, Limits: limitsOf(found.Limits)}
	switch n := len(v.Limits); {
	case n == 0:
		return nil, notFound("the tables have nothing about the key %q: all its buckets are full, or it is misspelt", key)
	case n > most:
		a.note("only the first %d of %d limits are shown; use a larger --most", most, n)
		v.Limits = v.Limits[:most]
	}
	if found.IsCut {
		a.note("the tables may have more limits than the %d that are looked at", 1000)
	}
	if found.Reservations.Next != nil {
		a.note("there are more reservations than are looked at; use reservations list")
	}
	for _, of := range v.Limits {
		probe, err := ratelimit.NewLimit(of.Limit, ratelimit.PerSecond(1))
		if err != nil {
			return nil, err
		}
		b := &bucket{stored: of.Key, set: set, now: v.At, request: probe.ForStoredKey(of.Key)}
		if err := a.lookAt(ctx, db, of, b, f.definition, inspect.PlansOf(of.Limit, list.Rules)); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// limitsOf returns the limits to show: of the two limits of a lock the first.
func limitsOf(found []*inspect.Use) (limits []*keyLimitView) {
	locks := make(map[string]bool)
	for _, u := range found {
		if name, is := strings.CutSuffix(u.Limit, blocks); is && len(u.Rows) > 0 {
			locks[name] = slices.ContainsFunc(found, func(other *inspect.Use) bool { return other.Limit == name })
		}
	}
	for _, u := range found {
		if name, is := strings.CutSuffix(u.Limit, blocks); !is || !locks[name] {
			limits = append(limits, &keyLimitView{Use: *u, isLock: locks[u.Limit]})
		}
	}
	return limits
}

// lookAt reads the level of a key in one limit, and says why it refuses.
func (a *app) lookAt(ctx context.Context, db *database, v *keyLimitView, b *bucket, d definition,
	plans []string,
) error {
	if v.isLock {
		d.policy = lockPolicy
	}
	b, err := a.onPlans(ctx, db, b, d, plans)
	if err != nil {
		return err
	}
	if err := b.look(ctx, db, &v.View); err != nil {
		return err
	}
	v.Refused = v.Why()
	for i := range v.Refused {
		if v.isLock {
			v.Refused[i].Why = "it is locked; ratelimit unlock ends that"
		}
	}
	return nil
}

func (v *keyView) fill(t *table) {
	t.field("key", keyText(v.Key))
	refused := "by no limit whose policy is known"
	for _, l := range v.Limits {
		for _, r := range l.Refused {
			name, until := l.Limit, "always"
			if l.Level == nil {
				name += ", " + r.By
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
	var also []string
	if v.Override != nil {
		also = append(also, "override "+v.Override.String())
	}
	if v.Pause != nil {
		from := ""
		if v.Pause.From.After(now) {
			from = "from " + instantFrom(v.Pause.From, now) + " "
		}
		until := instantFrom(v.Pause.Until, now)
		also = append(also, fmt.Sprintf("paused %suntil %s by %s: %s", from, until, v.Pause.Author, v.Pause.Reason))
	}
	if n := len(v.Reservations); n > 0 {
		also = append(also, count(n, "reservation"))
	}
	if n := len(v.Leases); n > 0 {
		also = append(also, count(n, "lease"))
	}
	line := func(plan, level, policy string) {
		t.row(v.Limit, plan, level, policy, fmt.Sprint(v.Use.Refused().Refused), dash(strings.Join(also, "; ")))
	}
	plan := dash(seenWords(v.Seen, now))
	switch {
	case v.isLock:
		line(plan, map[bool]string{true: "locked", false: "not locked"}[v.Owed() > 0], "package lockout")
	case v.Level != nil:
		line(plan, levelWords(v.Level), v.Words()+", "+v.DecidedBy)
	case v.OnPlans == nil && len(v.Rows) == 0:
		line(plan, "full", "only in the code")
	case v.OnPlans == nil:
		line(plan, number(v.Stored)+" as stored", "only in the code")
	}
	for _, p := range v.OnPlans {
		if p.Level != nil {
			line(cmp.Or(p.Plan, "none")+"?", levelWords(p.Level), p.Words()+", "+p.DecidedBy)
		}
	}
}
