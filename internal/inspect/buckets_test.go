package inspect_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// hostile are keys that a pattern, a text in quotes, a comparison of runes or a line would take for something else.
var hostile = []string{
	"", "%", "%%", "_", "a%", "a_", "a_b", "axb", `\`, `a\`, `a\%`, "'", "''; DROP TABLE ratelimit.buckets; --", `"`, "$1", "<script>alert(1)</script>",
	"\u0001", "a", "a\u0001", "a\u0001b", "a\u0002", "A", "ab", "ä", "z", "~", "\u007f", "\u0080", "\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff",
	"\U0010ffff\U0010ffff", "\u202eevil\u202c", "שלום", "שלום עולם", "a\u0301", "\u00e1", " ", "  ", "\n", "\t", "a\r\nb",
	strings.Repeat("k", 255), strings.Repeat("k", 256), strings.Repeat("\U0010ffff", 64), strings.Repeat("%", 256),
}

func keysOf(buckets []inspect.Bucket) (keys []string) {
	for _, b := range buckets {
		keys = append(keys, b.Key)
	}
	return keys
}

func TestLimits(t *testing.T) {
	t.Parallel()
	f := setup(t)
	none, err := f.Limits(t.Context(), "", 0)
	require.NoError(t, err)
	require.Empty(t, none)

	var names []string
	for n := range 60 {
		names = append(names, fmt.Sprintf("limit-%02d", n))
		for k := range 5 {
			f.put(t, names[n], fmt.Sprint(k), 1)
		}
	}
	for _, test := range []struct {
		after string
		most  int
		want  []string
	}{
		{"", 1000, names}, {"", 0, names[:50]}, {names[49], 3, names[50:53]}, {"limit-5", 1000, names[50:]}, {names[59], 1, nil},
	} {
		found, err := f.Limits(t.Context(), test.after, test.most)
		require.NoError(t, err)
		require.Equal(t, test.want, slices.Concat(found), "%d after %q, which need not be the name of a limit", test.most, test.after)
	}
}

func TestBucket(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, "messages", "ada", 2.5)
	f.put(t, "messages", "ad", 1)
	f.put(t, "spread", "ada", -1, 2, 3)
	f.exec(t, "DELETE FROM ratelimit.buckets WHERE name = 'spread' AND shard = 1")

	b, err := f.Bucket(t.Context(), "messages", "ada")
	require.NoError(t, err)
	require.Equal(t, inspect.Bucket{Limit: "messages", Key: "ada", Rows: []inspect.Row{{Tokens: 2.5, At: noon}}}, b)
	b, err = f.Bucket(t.Context(), "spread", "ada")
	require.NoError(t, err)
	require.Equal(t, []inspect.Row{{Tokens: -1, At: noon}, {Shard: 2, Tokens: 3, At: noon}}, b.Rows)
	b, err = f.Bucket(t.Context(), "messages", "bob")
	require.NoError(t, err)
	require.Equal(t, inspect.Bucket{Limit: "messages", Key: "bob"}, b)
	several, err := f.BucketsAt(t.Context(), []inspect.BucketID{{"spread", "ada"}, {"messages", "bob"}, {"messages", "ad"}})
	require.NoError(t, err)
	require.Equal(t, []string{"ada", "ad"}, keysOf(several))
	_, err = f.BucketsAt(t.Context(), make([]inspect.BucketID, 1001))
	require.ErrorIs(t, err, inspect.ErrInvalid)
	for _, key := range hostile {
		f.put(t, "hostile", key, 7)
		b, err := f.Bucket(t.Context(), "hostile", key)
		require.NoError(t, err)
		require.Len(t, b.Rows, 1, "%q", key)
		require.Equal(t, key, b.Key)
	}
}

// A query by prefix returns the same keys as strings.HasPrefix, in the order of their bytes, for any text.
func TestBucketsOfEachPrefix(t *testing.T) {
	t.Parallel()
	f := setup(t)
	prefixes := []string{"no such", "\u0003"}
	for _, key := range hostile {
		f.put(t, "hostile", key, 1)
		f.put(t, "hostilf", key, 1)
		for at := range key {
			if at < 4 {
				prefixes = append(prefixes, key[:at])
			}
		}
		prefixes = append(prefixes, key)
	}
	sorted := slices.Sorted(slices.Values(hostile))
	for _, prefix := range prefixes {
		var want []string
		for _, key := range sorted {
			if strings.HasPrefix(key, prefix) {
				want = append(want, key)
			}
		}
		buckets, err := f.Buckets(t.Context(), inspect.BucketQuery{Limit: "hostile", Prefix: prefix, Most: 1000})
		require.NoError(t, err, "%q", prefix)
		require.Equal(t, want, keysOf(buckets), "%q", prefix)
		for _, after := range []string{"", "a", "a\u0001", "k", sorted[len(sorted)-1]} {
			rest := slices.DeleteFunc(slices.Clone(want), func(key string) bool { return key <= after })
			buckets, err := f.Buckets(t.Context(), inspect.BucketQuery{Limit: "hostile", Prefix: prefix, After: &after, Most: 3})
			require.NoError(t, err)
			require.Equal(t, slices.Concat(rest[:min(3, len(rest))]), slices.Concat(keysOf(buckets)), "%q after %q", prefix, after)
		}
	}
}

// Pages of any size have each bucket once, with all its rows.
func TestBucketsByPages(t *testing.T) {
	t.Parallel()
	f, random := setup(t), testkit.Rand(t)
	var want []inspect.Bucket
	for n := range 40 {
		b := inspect.Bucket{Limit: "messages", Key: fmt.Sprintf("key %02d", n)}
		tokens := make([]float64, 1+n%5*32) // up to 129: more rows than a bucket has
		for shard := range min(len(tokens), 127) {
			tokens[shard] = random.Float64()
			b.Rows = append(b.Rows, inspect.Row{Shard: shard, Tokens: tokens[shard], At: noon})
		}
		f.put(t, b.Limit, b.Key, tokens...)
		f.put(t, "other", b.Key, 1)
		want = append(want, b)
	}
	for _, most := range []int{1, 7, 39, 40, 41, 0} {
		var found []inspect.Bucket
		query := inspect.BucketQuery{Limit: "messages", Most: most}
		for {
			page, err := f.Buckets(t.Context(), query)
			require.NoError(t, err)
			if most == 0 {
				require.Len(t, page, min(50, len(want)-len(found)))
			} else {
				require.Len(t, page, min(most, len(want)-len(found)))
			}
			if len(page) == 0 {
				break
			}
			found = append(found, page...)
			query.After = &page[len(page)-1].Key
		}
		require.Equal(t, want, found, "%d a page", most)
	}
}

func TestLeases(t *testing.T) {
	t.Parallel()
	f := setup(t)
	limiter, err := ratelimit.New(f.pool, ratelimit.Config{AsOf: func() time.Time { return noon }})
	require.NoError(t, err)
	short := ratelimit.Define("jobs", ratelimit.Concurrency{Slots: 5, Lease: time.Minute})
	long := ratelimit.Define("jobs", ratelimit.Concurrency{Slots: 5, Lease: time.Hour})
	first, err := limiter.Acquire(t.Context(), short.For("acme").Cost(2))
	require.NoError(t, err)
	second, err := limiter.Acquire(t.Context(), long.For("acme"))
	require.NoError(t, err)
	b, err := f.Bucket(t.Context(), "jobs", "acme")
	require.NoError(t, err)
	require.Len(t, b.Rows, 1)
	require.Equal(t, 2.0, b.Rows[0].Tokens)
	one := inspect.Lease{Fence: first.Fence, Slots: 2, Since: noon, Until: noon.Add(time.Minute)}
	other := inspect.Lease{Fence: second.Fence, Slots: 1, Since: time.UnixMicro(second.Fence).UTC(), Until: noon.Add(time.Hour)}
	require.Equal(t, []inspect.Lease{one, other}, b.Held(noon))
	require.Equal(t, []inspect.Lease{other}, b.Held(noon.Add(time.Minute)))
	require.Empty(t, b.Held(noon.Add(time.Hour)))
}

func TestUpstream(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.exec(t, `INSERT INTO ratelimit.upstreams VALUES ('words', 'ada', 3, $1, $1, 0, 0, 0, 0.4, true, $1::bigint + 5000000), ('words', 'bob', 0, $1, $1, 0, 0, 0, 1, false, 0)`,
		noon.UnixMicro())
	for key, want := range map[string]*inspect.Upstream{
		"ada": {Share: 0.4, PausedUntil: noon.Add(5 * time.Second), Seen: noon}, "bob": {Share: 1, Seen: noon}, "eve": nil,
	} {
		u, err := f.Upstream(t.Context(), "words", key, noon)
		require.NoError(t, err)
		require.Equal(t, want, u)
	}
	u, err := f.Upstream(t.Context(), "words", "ada", noon.Add(5*time.Second))
	require.NoError(t, err)
	require.Zero(t, u.PausedUntil, "it is over")
}
