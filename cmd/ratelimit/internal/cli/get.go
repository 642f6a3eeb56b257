package cli

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/rules"
)

// lately is how far back get looks for refusals.
const lately = time.Hour

// bucketView is a bucket with its state, policies and pause.
type bucketView struct {
	inspect.View
	Plans        []planView            `json:"plans,omitempty"` // only where no plan was named and several rules may decide
	Override     *rules.Statement      `json:"override"`
	Pause        *rules.Statement      `json:"pause"`
	Reservations []inspect.Reservation `json:"reservations"` // open ones
	Leases       []inspect.Lease       `json:"leases"`       // those on its slots that have not ended
	Refusals     []inspect.Minute      `json:"refusals"`     // of the last hour, by the minute
}

// planView is the level of a bucket under the rule of one plan.
type planView struct {
	Plan string `json:"plan"` // empty: none
	*inspect.Level
}

func (a *app) getCommand() *cobra.Command {
	var f bucketFlags
	cmd := a.command(cobra.Command{
		Use:   "get LIMIT [KEY]",
		Short: "Show a bucket: its level, its policy, and who waits",
		Long: `Show a bucket: its level, its policy and where the policy comes from, owed tokens, when it is full, pauses, open
reservations, leases, the share that an upstream accepts, and the refusals of the last hour if programs count them
(package refusals). It takes nothing. Without KEY it shows the shared bucket.

If the limit has rules for plans, it shows a line for each plan, unless you name one with --plan or --no-plan. If no policy
is known, it shows the stored numbers.`,
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
	v := &bucketView{}
	var err error
	if v.View, err = b.viewOfLevel(ctx, db); err != nil {
		return nil, err
	}
	for _, plan := range b.plans {
		level, err := plan.level(ctx, db)
		if err != nil {
			return nil, err
		}
		v.Plans = append(v.Plans, planView{plan.plan, level})
	}
	v.Leases = list(inspect.Bucket{Rows: v.Rows}.Held(v.At))
	for _, read := range []func(context.Context, *database, *bucketView) error{b.tables, b.waiting, b.refusals} {
		if err := read(ctx, db, v); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// viewOfLevel reads the rows of the bucket, and its level if a policy is known.
func (b *bucket) viewOfLevel(ctx context.Context, db *database) (v inspect.View, err error) {
	stored, err := db.reader.Bucket(ctx, b.request.Limit().Name(), b.stored)
	if err != nil {
		return v, err
	}
	v = inspect.ViewOf(stored)
	v.At = b.now.UTC()
	level, err := b.level(ctx, db)
	if level != nil {
		v.SetLevel(level)
	}
	return v, err
}

// level returns how full the bucket is, or nil if no policy is known.
func (b *bucket) level(ctx context.Context, db *database) (*inspect.Level, error) {
	if b.limiter == nil {
		return nil, nil //nolint:nilnil // the policy is unknown
	}
	return db.reader.Level(ctx, b.limiter, b.request, b.stored, b.definedBy())
}

// tables reads what the tables of rules say of the key.
func (b *bucket) tables(ctx context.Context, db *database, v *bucketView) error {
	list, err := db.store.List(ctx, rules.ListQuery{Limit: v.Limit, Key: &v.Key})
	if err != nil {
		return err
	}
	for _, o := range list.Overrides {
		if o.Key == v.Key && !o.From.After(list.Now) {
			v.Override = &o
		}
	}
	for _, p := range list.Pauses { // the limit and the key may both be paused: the later end counts
		if !p.From.After(list.Now) && (v.Pause == nil || p.Until.After(v.Pause.Until)) {
			v.Pause = &p
		}
	}
	return nil
}

// waiting reads the open reservations of the bucket, the first of them.
func (b *bucket) waiting(ctx context.Context, db *database, v *bucketView) error {
	found, err := db.reader.Reservations(ctx, inspect.ReservationQuery{State: "open", Limit: v.Limit, Key: &v.Key})
	v.Reservations = list(found.List)
	return err
}

func (b *bucket) refusals(ctx context.Context, db *database, v *bucketView) error {
	minutes, _, err := db.reader.Refusals(ctx, inspect.RefusalQuery{Limit: v.Limit, Key: &v.Key, Since: b.now.Add(-lately), Until: b.now})
	v.Refusals = list(minutes)
	return err
}

func (v *bucketView) fill(t *table) {
	t.field("limit", v.Limit)
	t.field("key", keyText(v.Key))
	if v.Level != nil {
		v.fillLevel(t)
	}
	for _, p := range v.Plans {
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
	if u := v.Upstream; u != nil {
		t.field("upstream accepts", number(u.Share)+" of the contract")
		t.field("upstream pauses until", instantFrom(u.PausedUntil, v.At))
	}
}

func (v *bucketView) fillRefusals(t *table) {
	var refused int64
	var last time.Time
	for _, m := range v.Refusals {
		refused += m.Refused
		last = m.Begin
	}
	if refused > 0 {
		whose := ""
		if v.Key == "" { // which the counts of keys that are not told apart have, too
			whose = " (with keys that are not told apart)"
		}
		t.field("refused", fmt.Sprintf("%d times in the last hour%s, the latest in the minute of %s", refused, whose, instantFrom(last, v.At)))
	}
}
