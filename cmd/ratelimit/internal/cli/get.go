package cli

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// lately is how far back get looks for refusals.
const lately = time.Hour

// bucketView is a bucket for programs. What needs a policy is null where none is known.
type bucketView struct {
	Limit string    `json:"limit"`
	Key   string    `json:"key"` // as stored; empty: the bucket that everybody shares
	At    time.Time `json:"at"`
	levelFields
	Plans        []planView        `json:"plans,omitempty"` // only where no plan was named and several rules may decide
	Rows         []rowView         `json:"rows"`            // as stored; none: full
	Override     *overrideView     `json:"override"`
	Pause        *pauseView        `json:"pause"`
	Reservations []reservationView `json:"reservations"` // open ones
	Leases       []leaseView       `json:"leases"`       // those on its slots that have not ended
	Refusals     []minuteView      `json:"refusals"`     // of the last hour, by the minute
}

// levelFields are the fields of a bucket that depend on its policy: null where that is not known.
type levelFields struct {
	Tokens    *float64       `json:"tokens"` // below 0 while something is owed
	Capacity  *float64       `json:"capacity"`
	Policy    *policyView    `json:"policy"`
	DecidedBy string         `json:"decided_by"`
	Unit      string         `json:"unit"`
	Mode      ratelimit.Mode `json:"mode"`
	FullAt    time.Time      `json:"full_at,omitzero"` // not there when it is full, or not known
	Upstream  *upstreamView  `json:"upstream"`         // null: the policy is not adaptive, or not known
}

// planView is a bucket under the rule of one plan, for programs.
type planView struct {
	Plan string `json:"plan"` // empty: none
	levelFields
}

// rowView is a row of a bucket for programs.
type rowView struct {
	Shard  int       `json:"shard"`
	Tokens float64   `json:"tokens"`
	At     time.Time `json:"at"`
}

// upstreamView is what the upstream of an adaptive limit accepts, for programs.
type upstreamView struct {
	Share       float64   `json:"share"` // of the contract
	Price       float64   `json:"price"` // of a token
	Charged     bool      `json:"charged"`
	PausedUntil time.Time `json:"paused_until,omitzero"` // as it has asked for; not there when it has not, or that is over
}

// minuteView is what was refused in a minute, for programs.
type minuteView struct {
	Begin   time.Time `json:"begin"`
	Refused int64     `json:"refused"`
	Cost    float64   `json:"cost"`
}

func (a *app) getCommand() *cobra.Command {
	var f bucketFlags
	cmd := a.command(cobra.Command{
		Use:   "get LIMIT [KEY]",
		Short: "Show a bucket: its level, what decides, and who waits",
		Long: `Show a bucket: how full it is, which policy decides and where that is from, what is owed and when it is full, the pause,
the open reservations, the leases on its slots, what its upstream accepts where it is adaptive, and what was refused in the last hour where
programs count it (package refusals). It takes nothing. Without KEY it shows the bucket that everybody shares.
Where the limit has rules for plans, and neither --plan nor --no-plan is given, it shows a line for each plan.

Where no policy is known it shows the numbers as they are stored, and says so.`,
		Args: limitAndKey,
		Example: `  ratelimit get sendMessage ada
  ratelimit get sendMessage ada --plan pro -o json`,
	}, func(ctx context.Context, args []string) error {
		return a.withBucketOf(ctx, &f, args, func(ctx context.Context, db *database, b *bucket) error {
			v, err := b.view(ctx, db)
			if err != nil {
				return err
			}
			if b.why != nil && len(b.plans) == 0 {
				a.note("%v; the level is as it was when it was last changed", b.why)
			}
			return a.show(v, v.fill)
		})
	})
	return a.withOutput(a.withBucket(cmd, &f))
}

// view reads all that there is to know of the bucket.
func (b *bucket) view(ctx context.Context, db *database) (*bucketView, error) {
	v := &bucketView{
		Limit: b.request.Limit().Name(), Key: b.stored, At: b.now.UTC(), Rows: []rowView{}, Reservations: []reservationView{}, Leases: []leaseView{}, Refusals: []minuteView{},
	}
	for _, plan := range b.plans {
		var other bucketView
		if err := plan.level(ctx, db, &other); err != nil {
			return nil, err
		}
		v.Plans = append(v.Plans, planView{plan.plan, other.levelFields})
	}
	for _, read := range []func(context.Context, *database, *bucketView) error{b.level, b.upstream, b.tables, b.rows, b.waiting, b.refusals} {
		if err := read(ctx, db, v); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// level reads how full the bucket is, where a policy is known.
func (b *bucket) level(ctx context.Context, _ *database, v *bucketView) error {
	if b.limiter == nil {
		return nil
	}
	value, err := b.limiter.Value(ctx, b.request)
	if err != nil {
		return err
	}
	d, err := b.limiter.Check(ctx, b.request.Cost(0))
	if err != nil {
		return err
	}
	state := d.States[0]
	v.At = value.AsOf.UTC()
	v.Tokens, v.Capacity, v.Policy = new(value.Tokens), new(value.Limit.Capacity()), &policyView{value.Limit.Policy()}
	v.DecidedBy, v.Unit, v.Mode = b.decidedBy(state.Rule), state.Unit, state.Mode
	if a, adapts := value.Limit.Policy().(ratelimit.Adaptive); adapts {
		v.Upstream, b.floor = &upstreamView{Share: 1, Price: 1, Charged: a.Apply}, cmp.Or(a.Floor, 0.1)
	}
	if wait, err := value.RetryAfter(value.AsOf, *v.Capacity); err == nil && wait > 0 {
		v.FullAt = v.At.Add(wait)
	}
	return nil
}

// upstream reads what all processes know of the upstream of an adaptive limit: this one has not heard of it yet.
func (b *bucket) upstream(ctx context.Context, db *database, v *bucketView) error {
	if v.Upstream == nil {
		return nil
	}
	known, found, err := db.reader.Upstream(ctx, v.Limit, v.Key)
	if err != nil || !found {
		return err
	}
	v.Upstream.Share = known.Within(b.floor)
	v.Upstream.Price = 1 / v.Upstream.Share
	if known.PausedUntil.After(v.At) {
		v.Upstream.PausedUntil = known.PausedUntil
	}
	return nil
}

// tables reads what the tables of rules say of the key.
func (b *bucket) tables(ctx context.Context, db *database, v *bucketView) error {
	list, err := db.store.ListSome(ctx, rules.ListQuery{Limit: v.Limit, Key: &v.Key})
	if err != nil {
		return err
	}
	now, err := db.reader.Now(ctx)
	if err != nil {
		return err
	}
	v.Override, v.Pause = overrideAt(&list, v.Limit, v.Key, now), pauseAt(&list, v.Limit, v.Key, now)
	return nil
}

// overrideAt returns the override that a key has at an instant, or nil.
func overrideAt(list *rules.Listing, limit, key string, at time.Time) *overrideView {
	for i := range list.Overrides {
		o := &list.Overrides[i]
		if o.Limit == limit && o.Key == key && !o.From.After(at) && (o.Until.IsZero() || o.Until.After(at)) {
			return overrideViewOf(&o.Override, o.Edit)
		}
	}
	return nil
}

// pauseAt returns the pause that a key has at an instant, or nil: of the one of the limit and its own the one that ends later.
func pauseAt(list *rules.Listing, limit, key string, at time.Time) (v *pauseView) {
	for _, p := range list.Pauses {
		if p.Limit == limit && (p.Key == key || p.Key == "") && !p.From.After(at) && p.Until.After(at) && (v == nil || p.Until.After(v.Until)) {
			v = &pauseView{p.Limit, p.Key, p.Until, p.From, p.Author, p.Reason}
		}
	}
	return v
}

func (b *bucket) rows(ctx context.Context, db *database, v *bucketView) error {
	stored, err := db.reader.Bucket(ctx, v.Limit, v.Key)
	if err != nil {
		return err
	}
	for _, row := range stored.Rows {
		v.Rows = append(v.Rows, rowView{row.Shard, row.Tokens, row.At})
	}
	v.Leases = leaseViews(stored.Held(v.At))
	return nil
}

// waiting reads the open reservations of the bucket, the first of them.
func (b *bucket) waiting(ctx context.Context, db *database, v *bucketView) error {
	found, err := db.reader.Reservations(ctx, inspect.ReservationQuery{State: "open", Limit: v.Limit, Key: &v.Key})
	if err != nil {
		return err
	}
	v.Reservations = reservationViews(found.List)
	return nil
}

func (b *bucket) refusals(ctx context.Context, db *database, v *bucketView) error {
	minutes, _, err := db.reader.Refusals(ctx, inspect.RefusalQuery{Limit: v.Limit, Key: &v.Key, Since: b.now.Add(-lately), Until: b.now})
	if err != nil {
		return err
	}
	for _, m := range minutes {
		v.Refusals = append(v.Refusals, minuteView(m))
	}
	return nil
}

func (v *bucketView) fill(t *table) {
	t.field("limit", v.Limit)
	t.field("key", keyText(v.Key))
	if v.Policy != nil {
		v.fillLevel(t)
	}
	for _, p := range v.Plans {
		name, says := "no plan", "no policy is known"
		if p.Plan != "" {
			name = "plan " + p.Plan
		}
		if p.Policy != nil {
			says = fmt.Sprintf("%s; %s, decided by %s", p.level(), p.words(), p.DecidedBy)
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
		t.field("override", v.Override.words())
		t.field("override by", v.Override.Author+": "+v.Override.Reason)
	}
	if v.Pause != nil {
		t.field("paused until", instantFrom(v.Pause.Until, v.At))
		t.field("paused", keyOrAll(v.Pause.Key))
		t.field("paused by", v.Pause.Author+": "+v.Pause.Reason)
	}
	for i := range v.Reservations {
		t.field("reserved", v.Reservations[i].words(v.Limit, v.Key, v.At))
	}
	for i := range v.Leases {
		t.field("held", v.Leases[i].words(v.At))
	}
	v.fillRefusals(t)
}

// words returns the policy and its mode, for people.
func (v *levelFields) words() string {
	if v.Mode != "" && v.Mode != ratelimit.On {
		return v.Policy.String() + ", mode " + string(v.Mode)
	}
	return v.Policy.String()
}

// level returns how full the bucket is, for people.
func (v *levelFields) level() string {
	return strings.TrimSpace(fmt.Sprintf("%s of %s %s", number(*v.Tokens), number(*v.Capacity), v.Unit))
}

func (v *bucketView) fillLevel(t *table) {
	t.field("level", v.level())
	if *v.Tokens < 0 {
		t.field("owed", number(-*v.Tokens))
	}
	full := "now"
	if !v.FullAt.IsZero() {
		full = instantFrom(v.FullAt, v.At)
	}
	t.field("full at", full)
	t.field("policy", v.words())
	t.field("decided by", v.DecidedBy)
	if u := v.Upstream; u != nil {
		t.field("price", u.words())
		if !u.PausedUntil.IsZero() {
			t.field(u.pauses(), instantFrom(u.PausedUntil, v.At))
		}
	}
}

// words returns what a token costs, for people.
func (v *upstreamView) words() string {
	words := fmt.Sprintf("%s, for %s of the contract", number(v.Price), number(v.Share))
	if !v.Charged {
		words += ", told and not charged"
	}
	return words
}

// pauses returns whether the upstream's Retry-After pauses the key, or only would.
func (v *upstreamView) pauses() string {
	if v.Charged {
		return "upstream pauses until"
	}
	return "upstream would pause until"
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
