package admin_test

import (
	"fmt"
	"html"
	"net/http"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/admintest"
	"github.com/pgratelimit/pgratelimit/rules"
)

var (
	pagerLink = regexp.MustCompile(`<a href="([^"]+)">(?:Look further|Next|Older)</a>`)
	keyLink   = regexp.MustCompile(`<a href="key\?key=([^&"]+)&amp;limit=messages">`)
	idLink    = regexp.MustCompile(`href="reservation\?id=([^"]+)"`)
)

// further follows the links that lead on from a page, and returns what one page after the other has of something.
func (f *fixture) further(t *testing.T, page string, thing *regexp.Regexp) (found [][]string) {
	t.Helper()
	for range 50 {
		got := f.get(t, page)
		require.Equal(t, http.StatusOK, got.status, page)
		require.NotContains(t, got.body, `class="fault"`, page)
		var here []string
		for _, match := range thing.FindAllStringSubmatch(got.body, -1) {
			here = append(here, match[1])
		}
		found = append(found, here)
		next := pagerLink.FindStringSubmatch(got.body)
		if next == nil {
			return found
		}
		page = "/admin/" + html.UnescapeString(next[1])
	}
	require.Fail(t, "the pages have no end", page)
	return nil
}

// TestOwingFarBehind finds a bucket that owes behind more buckets than one page reads.
func TestOwingFarBehind(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Exec(t, `INSERT INTO ratelimit.buckets (name, key, shard, value, ts)
		SELECT 'messages', 'user-' || to_char(i, 'FM000000'), 0, CASE WHEN i IN (7, 24000) THEN -5000 WHEN i = 9 THEN -0.0001 ELSE 5 END,
			(extract(epoch FROM now() - interval '1 second') * 1000000)::bigint
		FROM generate_series(1, 24500) AS i`)
	limit := f.get(t, admintest.Address("limit", "name", "messages")).body
	require.Contains(t, limit, "There may be more")
	require.Contains(t, limit, "user-000007")
	require.NotContains(t, limit, "user-024000")
	var all []string
	for _, page := range f.further(t, admintest.Address("owed", "limit", "messages"), keyLink) {
		all = append(all, page...)
	}
	require.Equal(t, []string{"user-000007", "user-024000"}, all)
	var after []string // on the first page or on one of those after it: how far that looks depends on the time it takes
	for _, page := range f.further(t, admintest.Address("owed", "limit", "messages", "after", "user-000007"), keyLink) {
		after = append(after, page...)
	}
	require.Equal(t, []string{"user-024000"}, after)
	require.Contains(t, f.get(t, admintest.Address("owed", "limit", "free-trials")).body, "None.")
}

// TestMoreWhoWereRefused than the page of a limit lists.
func TestMoreWhoWereRefused(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Exec(t, `INSERT INTO ratelimit.refusals SELECT date_trunc('minute', now()) - interval '1 minute', 'messages', '', 'user-' || to_char(i, 'FM00'), false, i, i, 1
		FROM generate_series(1, 30) AS i`)
	limit := f.get(t, admintest.Address("limit", "name", "messages")).body
	require.Len(t, keyLink.FindAllString(limit, -1), 10)
	require.Contains(t, limit, `href="refused?limit=messages"`)
	all := keyLink.FindAllStringSubmatch(f.get(t, admintest.Address("refused", "limit", "messages")).body, -1)
	require.Len(t, all, 30)
	require.Equal(t, "user-30", all[0][1])
}

func TestAllWhoWait(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Take(t, tokens.For("acme").Cost(120_000), tokens.For("globex").Cost(120_000))
	want := make(map[string]bool)
	for i := range 60 {
		r, err := f.Limiter.Reserve(t.Context(), tokens.For([]string{"acme", "globex"}[i%2]).Cost(30_000))
		require.NoError(t, err)
		if i%2 == 0 {
			want[r.ID] = true
		}
	}
	count := func(page string) (n int) {
		for _, ids := range f.further(t, page, idLink) {
			n += len(ids)
		}
		return n
	}
	require.Equal(t, 60, count(admintest.Address("limit", "name", "llm/tokens")), "20 on the page of the limit, and the others on those that follow")
	require.Equal(t, 60, count(admintest.Address("reservations", "state", "waiting", "limit", "llm/tokens")))
	seen := make(map[string]bool)
	for _, ids := range f.further(t, admintest.Address("key", "limit", "llm/tokens", "key", "acme"), idLink) {
		for _, id := range ids {
			seen[id] = true
		}
	}
	require.Equal(t, want, seen, "those of the bucket alone")
}

func TestAllOfTheHistoryOfABucket(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for i := range 65 {
		key := []string{"ada", "bob"}[i%13/12]
		_, err := f.Store.Pause(t.Context(), rules.Edit{Author: "ana", Reason: fmt.Sprintf("pause %d of %s", i, key)},
			rules.Pause{Limit: "messages", Key: key, Until: time.Now().Add(time.Hour)})
		require.NoError(t, err)
	}
	reason := regexp.MustCompile(`data-label="Reason"><bdi>(pause [^<]*)<`)
	var all []string
	for _, page := range f.further(t, admintest.Address("key", "limit", "messages", "key", "ada"), reason) {
		all = append(all, page...)
	}
	require.Len(t, all, 60)
	require.Equal(t, "pause 63 of ada", all[0])
	require.Equal(t, "pause 0 of ada", all[59])
}

// TestAllPausesOfAKeyAreOnOnePage: a page ends before a key whose pauses go on behind it.
func TestAllPausesOfAKeyAreOnOnePage(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Exec(t, `INSERT INTO ratelimit.rules (version, of, name, key, says, author, reason, from_us, until_us)
		SELECT 100 + i, 'pause', 'messages', 'user-' || to_char(least(i - 1, 49), 'FM00'), '{}', 'ana', 'x', from_us, from_us + 1
		FROM generate_series(1, 52) AS i, LATERAL (SELECT ((extract(epoch FROM now()) + 3600 * i) * 1000000)::bigint AS from_us) AS at`)
	pages := f.further(t, "/admin/overrides", keyLink)
	require.Len(t, pages, 2)
	require.Len(t, pages[0], 49)
	require.Equal(t, []string{"user-49", "user-49", "user-49"}, pages[1])
}
