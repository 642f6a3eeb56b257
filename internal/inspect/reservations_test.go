package inspect_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The Reader returns reservations as Reserve, Start and Settle write them.
func TestReservation(t *testing.T) {
	t.Parallel()
	f := setup(t)
	now := noon
	limiter, err := ratelimit.New(f.pool, ratelimit.Config{AsOf: func() time.Time { return now }})
	require.NoError(t, err)
	words := ratelimit.Define("words", ratelimit.TokenBucket{Rate: 60, Period: time.Minute, MaxReserved: 1000})
	calls := ratelimit.Define("calls", ratelimit.TokenBucket{Rate: 60, Period: time.Minute, MaxReserved: 1000})

	made, err := limiter.Reserve(t.Context(), words.For("ada").Plan("pro").Cost(90), calls.Global())
	require.NoError(t, err)
	read, found, err := f.Reservation(t.Context(), made.ID)
	require.NoError(t, err)
	require.True(t, found)
	require.Equal(t, "open", read.State)
	require.Equal(t, noon.Add(30*time.Second), read.ReadyAt)
	require.True(t, read.ReadyAt.Equal(made.ReadyAt) && read.StaleAt.Equal(made.StaleAt))
	require.Zero(t, read.StartedAt)
	require.ElementsMatch(t, []inspect.Item{{Limit: "words", Key: "ada", Plan: "pro", Cost: 90}, {Limit: "calls", Cost: 1}}, read.Items)

	now = made.ReadyAt
	_, err = limiter.Start(t.Context(), made.ID)
	require.NoError(t, err)
	read, _, err = f.Reservation(t.Context(), made.ID)
	require.NoError(t, err)
	require.True(t, read.StartedAt.Equal(now))
	require.NoError(t, limiter.Cancel(t.Context(), made.ID))
	list, err := f.Reservations(t.Context(), inspect.ReservationQuery{State: "cancelled"})
	require.NoError(t, err)
	require.Len(t, list.List, 1)
	require.Equal(t, made.ID, list.List[0].ID)
	require.Nil(t, list.Next)

	for _, id := range []string{number(1), "", "no ID", "'; --", made.ID + "0", "\x00"} {
		_, found, err := f.Reservation(t.Context(), id)
		require.NoError(t, err)
		require.False(t, found, id)
	}
}

// Pages of any size, of any number of rows looked at, have each reservation that matches once, in the order of their
// ends.
func TestReservationsByPages(t *testing.T) {
	t.Parallel()
	f := setup(t)
	hostileKey, none := "a%'\u202e\"\\", "none"
	const later = 200 * 365 * 24 * time.Hour // later than any run of the test
	var ids []string
	for n := range 24 {
		after, state, key := time.Duration(n/4)*time.Second, "open", "ada" // four of each end at once
		if n%2 == 1 {
			state = "settled"
		}
		if n%3 == 0 {
			key = hostileKey
		}
		if n >= 12 {
			after += later
		}
		f.reserve(t, number(n), state, after, []string{"calls", "words"}, []string{"", key})
		ids = append(ids, number(n))
	}
	for name, test := range map[string]struct {
		query   inspect.ReservationQuery
		matches func(n int) bool
	}{
		"All":         {inspect.ReservationQuery{}, func(int) bool { return true }},
		"Open":        {inspect.ReservationQuery{State: "open"}, func(n int) bool { return n%2 == 0 }},
		"Waiting":     {inspect.ReservationQuery{Waiting: true}, func(n int) bool { return n%2 == 0 && n >= 12 }},
		"OfLimit":     {inspect.ReservationQuery{Limit: "words"}, func(int) bool { return true }},
		"OfKey":       {inspect.ReservationQuery{Limit: "words", Key: &hostileKey}, func(n int) bool { return n%3 == 0 }},
		"OfAnyLimit":  {inspect.ReservationQuery{Key: &hostileKey, State: "settled"}, func(n int) bool { return n%3 == 0 && n%2 == 1 }},
		"OfBothApart": {inspect.ReservationQuery{Limit: "calls", Key: &hostileKey}, func(int) bool { return false }},
		"OfNone":      {inspect.ReservationQuery{Limit: "words", Key: &none}, func(int) bool { return false }},
		"OfNoState":   {inspect.ReservationQuery{State: "expired"}, func(int) bool { return false }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var want []string
			for n, id := range ids {
				if test.matches(n) {
					want = append(want, id)
				}
			}
			for _, look := range []int{1, 3, 4, 23, 24, 25} {
				for _, most := range []int{0, 1, 5, 24} {
					reader, query := newReader(t, f.pool, ""), test.query
					reader.LookAt(look)
					query.Most = most
					var found []string
					pages := 1
					for ; ; pages++ {
						require.LessOrEqual(t, pages, 25, "each gets on by a reservation")
						page, err := reader.Reservations(t.Context(), query)
						require.NoError(t, err)
						require.True(t, most == 0 || len(page.List) <= most)
						for _, r := range page.List {
							found = append(found, r.ID)
						}
						if query.After = page.Next; query.After == nil {
							break
						}
					}
					require.Equal(t, want, found, "looking at %d, %d at most", look, most)
					require.True(t, test.query.Waiting || pages*look >= len(ids), "a page of %d rows may be short, or empty, although there is more", look)
				}
			}
		})
	}
}
