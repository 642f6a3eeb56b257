package inspect_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// refused writes a row of refusals, which asked for two tokens each.
func (f *fixture) refused(t *testing.T, minute int, limit, key string, shadow bool, times int) {
	t.Helper()
	f.exec(t, `INSERT INTO ratelimit.refusals VALUES ($1, $2, 'POST /login', $3, $4, $5::integer, 2 * $5::integer, $6)`,
		noon.Add(time.Duration(minute)*time.Minute), limit, key, shadow, times, noon.UnixMicro())
}

func minute(n int, refused int64) inspect.Minute {
	return inspect.Minute{Begin: noon.Add(time.Duration(n) * time.Minute), Refused: refused, Cost: float64(2 * refused)}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	f := setup(t)
	key, hostileKey, empty := "ada", `%_\'"`, ""
	f.refused(t, 0, "logins", key, false, 1)
	f.refused(t, 0, "logins", empty, false, 2)
	f.refused(t, 0, "logins", hostileKey, false, 4)
	f.refused(t, 0, "words", key, false, 8)
	f.refused(t, 0, "words", key, true, 16)
	f.refused(t, 3, "logins", key, false, 32)
	f.refused(t, 3, "logins", empty, false, 0)
	f.refused(t, 4, "logins", key, true, 64)
	f.refused(t, 9, "words", empty, false, 0)
	hour := noon.Add(time.Hour)
	for name, test := range map[string]struct {
		query inspect.RefusalQuery
		want  []inspect.Minute
	}{
		"All":         {inspect.RefusalQuery{Since: noon, Until: hour}, []inspect.Minute{minute(0, 15), minute(3, 32)}},
		"OfLimit":     {inspect.RefusalQuery{Since: noon, Until: hour, Limit: "words"}, []inspect.Minute{minute(0, 8)}},
		"OfKey":       {inspect.RefusalQuery{Since: noon, Until: hour, Key: &key}, []inspect.Minute{minute(0, 9), minute(3, 32)}},
		"OfBoth":      {inspect.RefusalQuery{Since: noon, Until: hour, Limit: "logins", Key: &hostileKey}, []inspect.Minute{minute(0, 4)}},
		"OfTheRest":   {inspect.RefusalQuery{Since: noon, Until: hour, Key: &empty}, []inspect.Minute{minute(0, 2)}},
		"Shadow":      {inspect.RefusalQuery{Since: noon, Until: hour, Shadow: true}, []inspect.Minute{minute(0, 16), minute(4, 64)}},
		"Since":       {inspect.RefusalQuery{Since: noon.Add(time.Microsecond), Until: hour}, []inspect.Minute{minute(3, 32)}},
		"Until":       {inspect.RefusalQuery{Since: noon, Until: noon.Add(3 * time.Minute)}, []inspect.Minute{minute(0, 15)}},
		"ADay":        {inspect.RefusalQuery{Since: hour.Add(-24 * time.Hour), Until: hour}, []inspect.Minute{minute(0, 15), minute(3, 32)}},
		"OfNoTime":    {inspect.RefusalQuery{Since: noon, Until: noon}, []inspect.Minute{}},
		"TheOtherWay": {inspect.RefusalQuery{Since: hour, Until: noon}, []inspect.Minute{}},
	} {
		minutes, since, err := f.Refusals(t.Context(), test.query)
		require.NoError(t, err, name)
		require.Equal(t, test.want, minutes, name)
		require.Equal(t, test.query.Since, since, name)
	}
}

// What there is too much of is looked at from the end, minutes as a whole.
func TestRefusalsReadsABoundedNumberOfRows(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for n, keys := range []int{1, 2, 3, 4} { // ten rows
		for k := range keys {
			f.refused(t, n, "logins", []string{"a", "b", "c", "d"}[k], false, 1)
		}
	}
	query := inspect.RefusalQuery{Since: noon.Add(-time.Hour), Until: noon.Add(time.Hour)}
	all := []inspect.Minute{minute(0, 1), minute(1, 2), minute(2, 3), minute(3, 4)}
	for look, first := range map[int]int{11: 0, 10: 0, 9: 1, 8: 2, 7: 2, 6: 3, 5: 3, 4: 3, 3: 3, 1: 3} { // of the last minute all
		reader := newReader(t, f.pool, "")
		reader.LookAt(look)
		minutes, since, err := reader.Refusals(t.Context(), query)
		require.NoError(t, err)
		require.Equal(t, all[first:], minutes, "%d", look)
		wantSince := query.Since
		if look < 10 {
			wantSince = all[first].Begin
		}
		require.Equal(t, wantSince, since, "%d", look)

		sums, since, err := reader.TopRefused(t.Context(), refusals.TopConfig{By: refusals.ByKey, Since: query.Since})
		require.NoError(t, err)
		require.Equal(t, wantSince, since, "%d", look)
		require.Len(t, sums, 4)
		require.EqualValues(t, 4-first, sums[0].Refused, "of the key a, in each minute once")
	}
}

func TestRefusalsByLimit(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.refused(t, 0, "logins", "ada", false, 1)
	f.refused(t, 0, "logins", "", false, 2)
	f.refused(t, 0, "logins", "ada", true, 4)
	f.refused(t, 1, "words", "ada", false, 8)
	f.refused(t, 2, "others", "ada", false, 16)
	f.exec(t, `INSERT INTO ratelimit.refusals VALUES ($1, 'logins', '', '', false, 0, 0, 0, 32), ($1, 'calm', '', '', false, 0, 0, 0, 64)`, noon)
	minutes, since, err := f.RefusalsByLimit(t.Context(), []string{"logins", "words", "calm", "unused"}, nil, noon, noon.Add(time.Hour))
	require.NoError(t, err)
	require.Equal(t, noon, since)
	require.ElementsMatch(t, []inspect.LimitMinute{
		{Minute: minute(0, 4), Limit: "logins", Shadow: true},
		{Minute: minute(1, 8), Limit: "words"},
		{Minute: inspect.Minute{Begin: noon, Refused: 3, Cost: 6, Allowed: 32}, Limit: "logins"},
		{Minute: inspect.Minute{Begin: noon, Allowed: 64}, Limit: "calm"},
	}, minutes)
}

// The plan of a key is the one that its last refusal or reservation tells, in any of its limits. Refusals by an
// override tell none.
func TestSeen(t *testing.T) {
	t.Parallel()
	f := setup(t)
	now := noon
	limiter, err := ratelimit.New(f.pool, ratelimit.Config{AsOf: func() time.Time { return now }})
	require.NoError(t, err)
	words, calls := ratelimit.Define("words", ratelimit.PerMinute(60)), ratelimit.Define("calls", ratelimit.PerMinute(60))
	reserve := func(key, plan string) {
		_, err := limiter.Reserve(t.Context(), words.For(key).Plan(plan), calls.For(key).Plan(plan))
		require.NoError(t, err)
	}
	refuse := func(key, rule string, at time.Time) {
		f.exec(t, `INSERT INTO ratelimit.refusals (minute, name, route, key, shadow, refused, cost, last_us, rule)
			VALUES (date_trunc('minute', $4::timestamptz), 'words', '', $1, false, 1, 1, $3, $2)`, key, rule, at.UnixMicro(), at)
	}
	refuse("ada", "words, plan free", noon)
	refuse("ada", "words, plan pro", noon.Add(time.Minute))
	refuse("ada", "", noon.Add(2*time.Minute)) // by an override
	refuse("bob", "words, plan free", noon)
	refuse("eve", "words", noon)
	refuse("old", "words, plan free", noon.Add(-time.Hour))
	refuse("", "", noon)
	now = noon.Add(time.Second)
	reserve("bob", "pro")
	reserve("dan", "")
	found, err := f.Seen(t.Context(), inspect.SeenQuery{Keys: []string{"ada", "bob", "dan", "eve", "old", "", "none"}, Since: noon, Until: noon.Add(time.Hour)})
	require.NoError(t, err)
	plans := make(map[string]string)
	for id, seen := range found {
		plans[id.Limit+" "+id.Key] = seen.Plan + seen.At.Format(" 15:04:05")
	}
	require.Equal(t, map[string]string{
		"words ada": "pro 12:01:00", "words bob": "pro 12:00:01", "calls bob": "pro 12:00:01",
		"words dan": " 12:00:01", "calls dan": " 12:00:01", "words eve": " 12:00:00",
	}, plans)
}
