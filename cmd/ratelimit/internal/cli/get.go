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

// lately is how far back get looks for refusals.
const lately = time.Hour

// bucketView is a bucket with its state, policies and pause.
type bucketView struct{ inspect.Use }

func (a *app) getCommand() *cobra.Command {
	var f bucketFlags
	cmd := a.command(cobra.Command{
		Use:   "get LIMIT [KEY]",
		Short: "Show a bucket: its level, its policy, and who waits",
		Long: `Show a bucket: its level and debt, its policy and where that comes from, when it's full, pauses, open
reservations, leases, the share that an upstream accepts, and the last hour's refusals if your programs
count them (package refusals). It takes nothing. Without KEY it shows the shared bucket.

If the limit has rules for plans, you see the plan in the key's last refusal or reservation, or else every plan,
unless you set --plan or --no-plan. If no policy is known, you see the stored numbers.`,
		Args: limitAndKey,
		Example: `  ratelimit get sendMessage ada
  ratelimit get sendMessage ada --plan pro -o json`,
	}, func(ctx context.Context, args []string) error {
		return a.withBucketOf(ctx, &f, args, func(ctx context.Context, db *database, b *bucket) error {
			v, err := b.view(ctx, db)
			if err != nil {
				return err
			}
			if b.limiter == nil && len(b.plans) == 0 && v.isEmpty() {
				if unknown, err := db.unknown(ctx, v.Limit); err != nil || unknown != "" {
					return cmp.Or(err, notFound("%s; if the limit is in the code alone, set --policy", unknown))
				}
			}
			if b.why != nil && (len(b.plans) == 0 || f.plan != "") {
				a.note("%v", b.why)
			}
			return a.show(v, v.fill)
		})
	}, "0 done", "6 no such limit")
	return a.withOutput(a.withBucket(cmd, &f))
}

// isEmpty reports whether the tables have nothing about the bucket.
func (v *bucketView) isEmpty() bool {
	return len(v.Rows)+len(v.Reservations)+len(v.Refusals) == 0 && v.Pause == nil && v.Override == nil
}

// view reads the state, policies and pause of the bucket.
func (b *bucket) view(ctx context.Context, db *database) (*bucketView, error) {
	name := b.request.Limit().Name()
	stored, err := db.reader.Bucket(ctx, name, b.stored)
	if err != nil {
		return nil, err
	}
	seen, err := db.seen(ctx, b.now, b.stored)
	if err != nil {
		return nil, err
	}
	stated, err := db.store.List(ctx, rules.ListQuery{Limit: name, Key: &b.stored})
	if err != nil {
		return nil, err
	}
	v := &bucketView{inspect.UseOf(stored, &stated)}
	v.Seen = seen[inspect.BucketID{Limit: name, Key: b.stored}]
	if err := b.look(ctx, db, &v.View); err != nil {
		return nil, err
	}
	found, err := db.reader.Reservations(ctx, inspect.ReservationQuery{State: "open", Limit: name, Key: &b.stored})
	if err != nil {
		return nil, err
	}
	minutes, _, err := db.reader.Refusals(ctx, inspect.RefusalQuery{
		Limit: name, Key: &b.stored, Since: b.now.Add(-lately), Until: b.now,
	})
	v.Reservations, v.Refusals = list(found.List), list(minutes)
	return v, err
}

// seen returns what decided last on the buckets of keys, in the last day.
func (db *database) seen(ctx context.Context, now time.Time,
	keys ...string,
) (map[inspect.BucketID]*inspect.Seen, error) {
	return db.reader.Seen(ctx, inspect.SeenQuery{Keys: keys, Since: now.Add(-ratelimit.Day), Until: now})
}

// look sets the level of the bucket if a policy is known: on the plan that the flags say or on which the key was seen,
// or else on each plan.
func (b *bucket) look(ctx context.Context, db *database, v *inspect.View) error {
	v.At = b.now.UTC()
	plans := b.plans
	if len(plans) == 0 {
		v.Seen = nil
	}
	if v.Seen != nil {
		plans = nil
		b = b.plans[max(slices.IndexFunc(b.plans, func(on *bucket) bool { return on.plan == v.Seen.Plan }), 0)]
	}
	level, err := b.level(ctx, db)
	if level != nil {
		v.SetLevel(level)
	}
	for _, plan := range plans {
		if err != nil {
			return err
		}
		level, err = plan.level(ctx, db)
		v.OnPlans = append(v.OnPlans, inspect.PlanLevel{Plan: plan.plan, Level: level})
	}
	return err
}

// level returns how full the bucket is, or nil if no policy is known.
func (b *bucket) level(ctx context.Context, db *database) (*inspect.Level, error) {
	if b.limiter == nil {
		return nil, nil //nolint:nilnil // the policy is unknown
	}
	return db.reader.Level(ctx, b.limiter, b.request, b.stored, b.definedBy())
}

func (v *bucketView) fill(t *table) {
	t.field("limit", v.Limit)
	t.field("key", keyText(v.Key))
	if v.Level != nil {
		v.fillLevel(t)
	}
	for _, p := range v.OnPlans {
		name, says := "no plan", "policy unknown"
		if p.Plan != "" {
			name = "plan " + p.Plan
		}
		if p.Level != nil {
			says = fmt.Sprintf("%s; %s, decided by %s", levelWords(p.Level), p.Words(), p.DecidedBy)
		}
		t.field(name, says)
	}
	for _, row := range v.Rows {
		name := "stored"
		if len(v.Rows) > 1 {
			name = fmt.Sprintf("stored, shard %d", row.Shard)
		}
		t.field(name, fmt.Sprintf("%s at %s", number(row.Tokens), instantFrom(row.At, v.At)))
	}
	if len(v.Rows) == 0 {
		t.field("stored", "no row: the bucket is full")
	}
	if v.Override != nil {
		t.field("override", v.Override.String())
		t.field("override by", v.Override.Author+": "+v.Override.Reason)
	}
	if v.Pause != nil {
		if v.Pause.From.After(v.At) {
			t.field("paused from", instantFrom(v.Pause.From, v.At))
		}
		t.field("paused until", instantFrom(v.Pause.Until, v.At))
		t.field("paused", keyOrAll(v.Pause.Key))
		t.field("paused by", v.Pause.Author+": "+v.Pause.Reason)
	}
	for i := range v.Reservations {
		t.field("reserved", reservationWords(&v.Reservations[i], v.Limit, v.Key, v.At))
	}
	for _, lease := range v.Leases {
		t.field("held", leaseWords(lease, v.At))
	}
	v.fillRefusals(t)
}

// levelWords returns how full a bucket is, for people.
func levelWords(l *inspect.Level) string {
	return strings.TrimSpace(fmt.Sprintf("%s of %s %s", number(l.Tokens), number(l.Capacity), l.Unit))
}

// seenWords returns the plan on which a key was seen, for people.
func seenWords(seen *inspect.Seen, now time.Time) string {
	if seen == nil {
		return ""
	}
	return dash(seen.Plan) + ", last seen " + instantFrom(seen.At, now)
}

func (v *bucketView) fillLevel(t *table) {
	t.field("level", levelWords(v.Level))
	if owed := v.Owed(); owed > 0 {
		t.field("owed", number(owed))
	}
	full := "now"
	if !v.FullAt.IsZero() {
		full = instantFrom(v.FullAt, v.At)
	}
	t.field("full at", full)
	t.field("policy", v.Words())
	t.field("decided by", v.DecidedBy)
	t.field("plan", seenWords(v.Seen, v.At))
	if u := v.Upstream; u != nil {
		t.field("upstream accepts", number(u.Share)+" of the contract")
		t.field("upstream pauses until", instantFrom(u.PausedUntil, v.At))
	}
}

func (v *bucketView) fillRefusals(t *table) {
	if refused := v.Refused().Refused; refused > 0 {
		whose := ""
		if v.Key == "" { // which the counts of keys that are not told apart have, too
			whose = " (with keys that are not told apart)"
		}
		last := v.Refusals[len(v.Refusals)-1].Begin
		t.field("refused", fmt.Sprintf("%s in the last hour%s, the latest in the minute of %s", count(refused, "time"), whose,
			instantFrom(last, v.At)))
	}
}
