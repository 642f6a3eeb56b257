package refusals

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestTop(t *testing.T) {
	t.Parallel()
	b := setup(t)
	later := noon.Add(90 * time.Second)
	for _, r := range []struct {
		times int
		ratelimit.Refusal
	}{
		{5, ratelimit.Refusal{Limit: "logins", Route: "POST /login", Key: "mallory", Cost: 1, At: noon}},
		{2, ratelimit.Refusal{Limit: "logins", Route: "POST /reset", Key: "mallory", Cost: 1, At: later}},
		{4, ratelimit.Refusal{Limit: "logins", Route: "POST /login", Key: "trudy", Cost: 1, At: noon}},
		{6, ratelimit.Refusal{Limit: "tokens", Key: "mallory", Cost: 0.5, At: later}},
		{3, ratelimit.Refusal{Limit: "tokens", Cost: 2, At: noon}},
		{9, ratelimit.Refusal{Limit: "tried", Key: "alice", Cost: 1, At: noon, Shadow: true}},
	} {
		for range r.times {
			b.Refused(t.Context(), r.Refusal)
		}
	}
	require.NoError(t, b.flush(t.Context(), true))
	next := noon.Add(time.Minute)
	for name, test := range map[string]struct {
		config TopConfig
		want   []Sum
	}{
		"ByLimit": {TopConfig{}, []Sum{
			{Limit: "logins", Refused: 11, Cost: 11, Last: later}, {Limit: "tokens", Refused: 9, Cost: 9, Last: later},
		}},
		"ByRoute": {TopConfig{By: ByRoute}, []Sum{
			{Limit: "logins", Route: "POST /login", Refused: 9, Cost: 9, Last: noon},
			{Limit: "tokens", Refused: 9, Cost: 9, Last: later},
			{Limit: "logins", Route: "POST /reset", Refused: 2, Cost: 2, Last: later},
		}},
		"ByKey": {TopConfig{By: ByKey}, []Sum{
			{Limit: "logins", Key: "mallory", Refused: 7, Cost: 7, Last: later},
			{Limit: "tokens", Key: "mallory", Refused: 6, Cost: 3, Last: later},
			{Limit: "logins", Key: "trudy", Refused: 4, Cost: 4, Last: noon},
			{Limit: "tokens", Refused: 3, Cost: 6, Last: later}, // the latest of any key
		}},
		"TheMost":    {TopConfig{By: ByKey, Most: 1}, []Sum{{Limit: "logins", Key: "mallory", Refused: 7, Cost: 7, Last: later}}},
		"OfALimit":   {TopConfig{By: ByKey, Limit: "tokens", Most: 1}, []Sum{{Limit: "tokens", Key: "mallory", Refused: 6, Cost: 3, Last: later}}},
		"OfNone":     {TopConfig{Limit: "tok\x00ens"}, []Sum{}},
		"OfLongName": {TopConfig{Limit: strings.Repeat("a", 1000)}, []Sum{}},
		"Shadows":    {TopConfig{Shadow: true}, []Sum{{Limit: "tried", Refused: 9, Cost: 9, Last: noon}}},
		"Since":      {TopConfig{Since: next}, []Sum{{Limit: "tokens", Refused: 6, Cost: 3, Last: later}, {Limit: "logins", Refused: 2, Cost: 2, Last: later}}},
		"SinceNow":   {TopConfig{Since: next.Add(time.Microsecond)}, []Sum{}},
		"Until":      {TopConfig{Until: next}, []Sum{{Limit: "logins", Refused: 9, Cost: 9, Last: noon}, {Limit: "tokens", Refused: 3, Cost: 6, Last: noon}}},
	} {
		top, err := b.top(t, test.config)
		require.NoError(t, err, name)
		for i := range top {
			top[i].Last = top[i].Last.UTC()
		}
		require.Equal(t, test.want, top, name)
	}
	for _, config := range []TopConfig{{By: "name"}, {Most: -1}, {Most: maxMost + 1}} {
		_, err := b.top(t, config)
		require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
	}
	for schema, want := range map[string]error{"another": ratelimit.ErrNotMigrated, "a b": ratelimit.ErrInvalidConfig} {
		_, err := Top(t.Context(), b.pool, schema, TopConfig{})
		require.ErrorIs(t, err, want)
	}
}

func TestPrune(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const minutes, keys = 7, 3500 // more than a statement deletes
	_, err := b.pool.Exec(t.Context(), `
		INSERT INTO ratelimit.refusals (minute, name, route, key, shadow, refused, cost, last_us)
		SELECT $1::timestamptz + n * interval '1 minute', 'logins', '', k::text, false, 1, 1, 0
		FROM generate_series(0, $2 - 1) AS n, generate_series(1, $3) AS k`, noon, minutes, keys)
	require.NoError(t, err)

	deleted, err := b.Prune(t.Context(), noon)
	require.NoError(t, err)
	require.Zero(t, deleted, "it began at noon, and not before")
	deleted, err = b.Prune(t.Context(), noon.Add(3*time.Minute))
	require.NoError(t, err)
	require.EqualValues(t, 3*keys, deleted)
	rows := b.rows(t)
	require.Len(t, rows, (minutes-3)*keys)
	require.Equal(t, noon.Add(3*time.Minute), rows[0].Minute)

	group, ctx := errgroup.WithContext(t.Context()) // several at once share the work
	each := make([]int64, 4)
	for i := range each {
		group.Go(func() (err error) {
			each[i], err = b.Prune(ctx, noon.Add(time.Hour))
			return err
		})
	}
	require.NoError(t, group.Wait())
	require.EqualValues(t, (minutes-3)*keys, each[0]+each[1]+each[2]+each[3])
	require.Empty(t, b.rows(t))

	b.refuse(noon, "free", 1)
	b.refuse(noon, "held", 1)
	require.NoError(t, b.flush(t.Context(), true))
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM ratelimit.refusals WHERE key = 'held' FOR UPDATE")
	require.NoError(t, err)
	deleted, err = b.Prune(t.Context(), noon.Add(time.Hour))
	require.NoError(t, err)
	require.EqualValues(t, 2, deleted, "it deletes the rows of the empty key and of free, and waits for no row")
	require.NoError(t, tx.Rollback(t.Context()))

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = b.Prune(ctx, noon)
	require.ErrorIs(t, err, context.Canceled)
}
