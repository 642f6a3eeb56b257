package bucket_test

import (
	"math/rand/v2"
	"slices"
	"sort"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// listed are windows that begin at the instants of a list.
type listed struct{ begins []int64 }

// Begin lets windows beside the list have 400 days.
func (l *listed) Begin(i int64) int64 {
	last := int64(len(l.begins) - 1)
	in := min(max(i, 0), last)
	return l.begins[in] + (i-in)*400*day
}

func (l *listed) Index(at int64) int64 {
	return int64(sort.Search(len(l.begins), func(i int) bool { return l.begins[i] > at })) - 1
}

func (*listed) String() string { return "" }

// drawWindows draws a revision of days, weeks, months, quarters or years, which begin at midnight by package time.
// Midnight exists once on each day of the zones.
func drawWindows(t *testing.T, r *rand.Rand, from int64, change bucket.Change) (bucket.Revision, []int64) {
	t.Helper()
	zones := []string{"UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Antarctica/Troll", "Asia/Kathmandu"}
	zone, err := time.LoadLocation(zones[r.IntN(len(zones))])
	require.NoError(t, err)
	months, month, first := []int{1, 3, 12}[r.IntN(3)], r.IntN(12), 1+r.IntN(31)
	isFirst := []func(day time.Time) bool{
		func(time.Time) bool { return true },
		func(day time.Time) bool { return int(day.Weekday()) == first%7 },
		func(day time.Time) bool {
			last := day.AddDate(0, 1, -day.Day()).Day()
			return (int(day.Month())-month)%months == 0 && day.Day() == min(first, last)
		},
	}[min(r.IntN(5), 2)]
	var begins []int64
	opened := time.UnixMicro(opening).UTC()
	for i := -800; i < 1100; i++ {
		if day := time.Date(opened.Year(), opened.Month(), opened.Day()+i, 0, 0, 0, 0, zone); isFirst(day) {
			begins = append(begins, day.UnixMicro())
		}
	}
	rate := float64(1 + r.Int64N(20))
	return bucket.Revision{From: from, Change: change, Terms: bucket.Terms{
		Capacity: rate, Rate: rate, Step: day, Steps: 1, MaxDebt: rate, Reserves: true, Kind: bucket.Steps{}, Windows: &listed{begins},
	}}, begins
}

// windowEras are the policies of a limit, each of which takes the place of another at an instant, or at the begin of a
// window.
type windowEras struct {
	list   []bucket.Revision
	begins [][]int64
}

func drawEras(t *testing.T, r *rand.Rand) (revisions windowEras) {
	t.Helper()
	for from, change := int64(0), bucket.Keep; len(revisions.list) == 0 || r.IntN(3) > 0 && len(revisions.list) < 4; {
		revision, begins := drawWindows(t, r, from, change)
		if r.IntN(3) == 0 && from > 0 {
			revision.From = begins[slices.IndexFunc(begins, func(at int64) bool { return at > from })]
		}
		revisions.list, revisions.begins = append(revisions.list, revision), append(revisions.begins, begins)
		from, change = max(revision.From, opening)+day+int64(r.Uint64N(uint64(120*day))), []bucket.Change{bucket.Keep, bucket.Carry, bucket.Add, bucket.Reset}[r.IntN(4)]
	}
	return revisions
}

func (e windowEras) exactly() buckettest.ExactRevisions {
	return buckettest.ExactlyRevisions(e.list, e.begins...)
}

// next moves the clock: a little, to the next change or beside it, over several, or back. A clock that is wrong by days
// is drawn where no revision begins.
func (e windowEras) next(r *rand.Rand, revision int, now int64) int64 {
	next := now
	switch r.IntN(8) {
	case 0, 1:
		next += int64(r.Uint64N(uint64(day)))
	case 2, 3:
		begins := e.begins[revision]
		next = begins[slices.IndexFunc(begins, func(at int64) bool { return at > now+1 })] + int64(r.IntN(3)-1)
	case 4:
		if revision+1 < len(e.list) {
			next = max(now, e.list[revision+1].From+int64(r.IntN(3)-1))
		}
	case 5:
		next += int64(r.Uint64N(uint64(40 * day)))
	case 6:
		next -= int64(r.Uint64N(uint64(minute)))
	default:
		if len(e.list) == 1 {
			next -= int64(r.Uint64N(uint64(60 * day)))
		}
	}
	return min(max(next, opening), opening+600*day)
}

// TestWindowsAgreeWithTheExactModel takes random steps, two hundred in each history.
func TestWindowsAgreeWithTheExactModel(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		waits, owed := 0, 0
		for history := range testkit.Sized[uint64](10, 15) {
			r := rand.New(rand.NewPCG(seed, history))
			revisions := drawEras(t, r)
			memory, model, now := table{}, buckettest.NewExactBucket(revisions.exactly()), opening+int64(r.Uint64N(uint64(day)))
			for step := range 200 {
				if step == 100 && r.IntN(2) == 0 && model.IsThere() { // another definition in the code
					revisions = drawEras(t, r)
					model.Redefine(revisions.exactly())
				}
				now = revisions.next(r, model.Revisions.At(now), now)
				ask := bucket.Ask{Key: bucket.Key{Name: "limit"}, Terms: bucket.NewRevisions(revisions.list).Holding(opening).At(now)}
				ask.Cost, ask.MinBalance = float64(r.Int64N(12)), float64(-r.Int64N(3)*r.Int64N(30))
				answer := memory.take([]bucket.Ask{ask}, now)[0]
				before := model.Clone()
				at, _ := model.Bring(answer.Now)
				require.Equal(t, at, answer.Now, "history %d, step %d", history, step)
				require.True(t, at >= now && at <= now+minute)
				spare := buckettest.Spare(model.Tokens(at), ask.Cost, ask.MinBalance)
				require.Equal(t, spare >= 0, answer.Allowed, "history %d, step %d", history, step)
				if answer.Allowed {
					model.Spend(ask.Cost, at)
				}
				ask.Terms = ask.Terms.At(at)
				outlook := ask.Tell(&answer, ask.MinBalance, &bucket.Snapshot{})
				require.Zero(t, buckettest.Off(outlook.Tokens, model.Tokens(at)), "history %d, step %d", history, step)
				if wait := outlook.RetryAfter.Microseconds(); !answer.Allowed && at+wait < opening+600*day {
					require.GreaterOrEqual(t, buckettest.Spare(model.Tokens(at+wait), ask.Cost, ask.MinBalance), 0.0)
					require.Less(t, buckettest.Spare(model.Tokens(at+wait-1), ask.Cost, ask.MinBalance), 0.0)
					waits++
				}
				if outlook.Tokens < 0 {
					owed++
				}
				if ask.Cost == 0 || !answer.Allowed && len(revisions.list) > 1 && !before.IsWrong(at) { // which writes nothing, but a right clock in place of a wrong one
					model = before
				}
			}
		}
		require.Positive(t, min(waits, owed))
	})
}
