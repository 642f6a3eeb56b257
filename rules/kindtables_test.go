package rules_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// kindRow is a policy of a new kind in the columns of a table, as somebody may write it.
type kindRow struct {
	row
	slices, firstWeekday, firstDay, firstMonth *int
	resets, zone                               *string
	floor, growth                              *float64
	epochUs                                    *int64
	apply                                      *bool
}

var errColumns = errors.New("the columns are not those of the kind")

// limit asks the core for the same policy. What a column may not say, or has to, is what the kind has.
func (r *kindRow) limit() error {
	period := time.Duration(r.periodUs) * time.Microsecond
	calendar := r.resets != nil || r.zone != nil || r.firstWeekday != nil || r.firstDay != nil || r.firstMonth != nil
	tokens := r.capacity != nil || r.maxReserved != nil || r.startUs != nil
	var policy ratelimit.Policy
	switch r.kind {
	case "sliding window":
		if r.slices == nil || *r.slices == 0 || calendar || tokens || r.shards != 1 { // 0 is the default in Go
			return errColumns
		}
		policy = ratelimit.SlidingWindow{Rate: r.rate, Period: period, Slices: *r.slices}
	case "concurrency":
		if r.slices != nil || calendar || tokens || r.shards != 1 || r.rate != math.Trunc(r.rate) || r.periodUs == 0 {
			return errColumns
		}
		policy = ratelimit.Concurrency{Most: int(r.rate), Lease: period}
	case "calendar window":
		var err error
		if policy, err = r.calendarWindow(); err != nil {
			return err
		}
	default:
		if r.slices != nil || calendar {
			return errColumns
		}
		if err := r.row.limit(); err != nil {
			return err
		}
		if policy = ratelimit.PerSecond(1); r.kind == "fixed window" {
			policy = ratelimit.FixedWindow{Rate: 1, Period: time.Second}
		}
	}
	if r.floor != nil || r.growth != nil || r.epochUs != nil || r.apply != nil {
		if r.floor == nil || r.growth == nil || r.epochUs == nil || r.apply == nil {
			return errColumns
		}
		if *r.floor == 0 || *r.growth == 0 || *r.epochUs == 0 { // the defaults in Go
			return errColumns
		}
		policy = ratelimit.Adaptive{Contract: policy, Floor: *r.floor, Growth: *r.growth, Epoch: time.Duration(*r.epochUs) * time.Microsecond, Apply: *r.apply}
	}
	_, err := ratelimit.NewLimit("limit", policy)
	return err
}

// calendarWindow returns the policy of a calendar window.
func (r *kindRow) calendarWindow() (ratelimit.Policy, error) {
	days := map[string]int64{"day": 1, "week": 7, "month": 31, "quarter": 92, "year": 366}
	if r.resets == nil || r.zone == nil || *r.zone == "" || r.slices != nil || r.capacity != nil || r.startUs != nil || r.shards != 1 {
		return nil, errColumns
	}
	if r.periodUs != days[*r.resets]*24*3_600_000_000 {
		return nil, errColumns
	}
	week, month := *r.resets == "week", *r.resets == "quarter" || *r.resets == "year"
	day := month || *r.resets == "month"
	if (r.firstWeekday != nil) != week || (r.firstDay != nil) != day || (r.firstMonth != nil) != month {
		return nil, errColumns
	}
	p := ratelimit.CalendarWindow{Rate: r.rate, Resets: ratelimit.Calendar(*r.resets), Zone: *r.zone}
	if week {
		p.FirstWeekday = time.Weekday(*r.firstWeekday)
	}
	if day {
		if p.FirstDay = *r.firstDay; p.FirstDay == 0 {
			return nil, errColumns
		}
	}
	if month {
		if p.FirstMonth = time.Month(*r.firstMonth); p.FirstMonth == 0 {
			return nil, errColumns
		}
	}
	switch {
	case r.maxReserved == nil:
	case *r.maxReserved == 0:
		p.MaxReserved = ratelimit.NoDebt
	case *r.maxReserved < 0:
		return nil, errColumns
	default:
		p.MaxReserved = *r.maxReserved
	}
	return p, nil
}

// drawKind draws a policy that may be, and has one column or two say something at the edge of that.
func drawKind(random *rand.Rand) kindRow {
	r := kindRow{row: row{kind: "sliding window", rate: 7, periodUs: 60_000_000, shards: 1}}
	switch random.IntN(4) {
	case 0:
		r.slices = new([]int{1, 60, 128}[random.IntN(3)])
		r.periodUs *= 128
	case 1:
		r.kind, r.rate, r.periodUs = "concurrency", 1+float64(random.IntN(1000)), 1000+random.Int64N(86400000000)
	case 2:
		r.kind, r.zone = "calendar window", new("Europe/Berlin")
		r.resets = new([]string{"day", "week", "month", "quarter", "year"}[random.IntN(5)])
		r.periodUs = map[string]int64{"day": 1, "week": 7, "month": 31, "quarter": 92, "year": 366}[*r.resets] * 24 * 3_600_000_000
		switch *r.resets {
		case "week":
			r.firstWeekday = new(random.IntN(7))
		case "quarter", "year":
			r.firstMonth, r.firstDay = new(1+random.IntN(12)), new(1+random.IntN(31))
		case "month":
			r.firstDay = new(1 + random.IntN(31))
		}
	default:
		r.kind = "token bucket"
	}
	if r.kind != "sliding window" && r.kind != "concurrency" && random.IntN(2) == 0 {
		r.floor, r.growth, r.epochUs, r.apply = new(0.001), new(1.0), new(int64(100_000)), new(random.IntN(2) == 0)
	}
	for range random.IntN(3) {
		r.disturb(random)
	}
	return r
}

// disturb has a column say something else.
func (r *kindRow) disturb(random *rand.Rand) {
	whole := func() *int {
		return [...]*int{nil, new(0), new(1), new(-1), new(6), new(7), new(12), new(13), new(31), new(32), new(128), new(129)}[random.IntN(12)]
	}
	share := func() *float64 {
		return [...]*float64{nil, new(0.0), new(0.001), new(math.Nextafter(0.001, 0)), new(1.0), new(math.Nextafter(1, 2)), new(math.NaN()), new(-1.0)}[random.IntN(8)]
	}
	tokens := func() *float64 {
		return [...]*float64{nil, new(0.0), new(1e-9), new(r.rate), new(math.Nextafter(r.rate, 0)), new(math.Nextafter(r.rate, 1e13)), new(math.NaN())}[random.IntN(7)]
	}
	switch random.IntN(16) {
	case 0:
		r.kind = []string{"sliding window", "concurrency", "calendar window", "token bucket", "fixed window"}[random.IntN(5)]
	case 1:
		r.rate = []float64{0, 1, 0.5, 1000, 1001, 1e-9, 1e12, 2e12, math.NaN(), math.Inf(1), -1, 3.5}[random.IntN(12)]
	case 2:
		r.periodUs = []int64{0, 1, 999, 1000, 86400000000, 86400000001, 60_000_000, 3155760000000000, 3155760000000001}[random.IntN(9)]
	case 3:
		r.capacity = tokens()
	case 4:
		r.maxReserved = tokens()
	case 5:
		r.shards = 1 << random.IntN(3)
	case 6:
		r.startUs = new(int64(5))
	case 7:
		r.slices = whole()
	case 8:
		r.resets = [...]*string{nil, new("day"), new("week"), new("month"), new("quarter"), new("year"), new("hour"), new("")}[random.IntN(8)]
	case 9:
		r.zone = [...]*string{nil, new(""), new("UTC"), new("UTC+3"), new("localtime"), new("Etc/GMT-3"), new("a b"), new(strings.Repeat("z", 65))}[random.IntN(8)]
	case 10:
		r.firstWeekday = whole()
	case 11:
		r.firstDay = whole()
	case 12:
		r.firstMonth = whole()
	case 13:
		r.floor = share()
	case 14:
		r.growth = share()
	default:
		r.epochUs = [...]*int64{nil, new(int64(0)), new(int64(99_999)), new(int64(100_000)), new(int64(3_600_000_000)), new(int64(3_600_000_001))}[random.IntN(6)]
	}
}

// insert writes the policy as a rule, or as an override.
func (r *kindRow) insert(ctx context.Context, pool *pgxpool.Pool, table string, n int) error {
	const columns = `kind, rate, period_us, capacity, max_reserved, shards, start_us, slices, resets, zone, first_weekday, first_day, first_month,
		floor, growth, epoch_us, apply`
	sql := `INSERT INTO ratelimit.rules (name, ` + columns + `)
		VALUES ('limit' || $1::int, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)`
	if table == "overrides" {
		sql = `INSERT INTO ratelimit.overrides (name, key, ` + columns + `, mode, author, reason)
			VALUES ('limit', $1::int::text, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, 'on', 'ana', 'a test')`
	}
	_, err := pool.Exec(ctx, sql, n, r.kind, r.rate, r.periodUs, r.capacity, r.maxReserved, r.shards, r.startUs,
		r.slices, r.resets, r.zone, r.firstWeekday, r.firstDay, r.firstMonth, r.floor, r.growth, r.epochUs, r.apply)
	return err
}

// TestTablesAgreeWithNewLimitOfEachKind writes policies of the new kinds into the tables by hand: these hold what the core
// accepts, and nothing else.
func TestTablesAgreeWithNewLimitOfEachKind(t *testing.T) {
	t.Parallel()
	for _, table := range []string{"rules", "overrides"} {
		t.Run(table, func(t *testing.T) {
			t.Parallel()
			pool := postgrestest.New(t)
			random, inserts, accepted := testsize.Rand(t), testsize.Of(400, 1_300), map[string]int{}
			for n := range inserts {
				r := drawKind(random)
				want, got := r.limit(), r.insert(t.Context(), pool, table, n)
				require.Equal(t, want == nil, got == nil, "%s\ncore: %v\ntable: %v", r.String(), want, got)
				if want == nil {
					accepted[r.kind]++
				}
			}
			for _, kind := range []string{"sliding window", "concurrency", "calendar window", "token bucket"} {
				require.Greater(t, accepted[kind], inserts/100, kind)
			}
		})
	}
}

// String spells out what pointers point to.
func (r *kindRow) String() string {
	show := func(name string, value any) string { return fmt.Sprintf(" %s=%v", name, value) }
	text := show("kind", r.kind) + show("rate", r.rate) + show("period", r.periodUs) + show("shards", r.shards)
	for name, value := range map[string]*float64{"capacity": r.capacity, "max_reserved": r.maxReserved, "floor": r.floor, "growth": r.growth} {
		if value != nil {
			text += show(name, *value)
		}
	}
	for name, value := range map[string]*int{"slices": r.slices, "weekday": r.firstWeekday, "day": r.firstDay, "month": r.firstMonth} {
		if value != nil {
			text += show(name, *value)
		}
	}
	for name, value := range map[string]*string{"resets": r.resets, "zone": r.zone} {
		if value != nil {
			text += show(name, *value)
		}
	}
	if r.epochUs != nil {
		text += show("epoch", *r.epochUs)
	}
	return text + show("start", r.startUs != nil) + show("apply", r.apply != nil)
}
