package admin_test

import (
	"net/http"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/admintest"
)

// rowsOf returns the texts that a pattern finds in a page.
func rowsOf(page string, pattern *regexp.Regexp) (all []string) {
	for _, match := range pattern.FindAllStringSubmatch(page, -1) {
		all = append(all, match[1])
	}
	return all
}

func TestSearchOfLimits(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Take(t, messages.For("ada"))
	limit := regexp.MustCompile(`<th scope="row"><a href="limit\?name=[^"]*">([^<]*)</a>`)
	require.Equal(t, []string{"failed-logins", "free-trials", "llm/tokens", "messages"}, rowsOf(f.get(t, "/admin/").body, limit))
	require.Equal(t, []string{"failed-logins"}, rowsOf(f.get(t, admintest.Address("", "search", " LOG")).body, limit))
	none := f.get(t, admintest.Address("", "search", "nothing"))
	require.Equal(t, http.StatusOK, none.status)
	require.Contains(t, none.body, "No name of a limit contains this.")
}

func TestOrderOfBuckets(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Take(t, messages.For("ada").Cost(50), messages.For("carla").Cost(90), messages.For("bob").Cost(10))
	key := regexp.MustCompile(`<th scope="row"><a href="key\?[^"]*"><bdi class="key" dir="ltr">([^<]*)</bdi></a>`)
	for order, want := range map[string][]string{
		"": {"ada", "bob", "carla"}, "key": {"ada", "bob", "carla"}, "level": {"carla", "ada", "bob"}, "last change": {"bob", "carla", "ada"}, "size": {"ada", "bob", "carla"},
	} {
		page := f.get(t, admintest.Address("limit", "name", "messages", "sort", order)).body
		require.Equal(t, want, rowsOf(page, key), order)
	}
}

// TestRangeOfRequests promises that charts show the allowed and refused requests of an hour, or of a day.
func TestRangeOfRequests(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Exec(t, `INSERT INTO ratelimit.refusals (minute, name, route, key, shadow, refused, cost, last_us, allowed)
		SELECT date_trunc('minute', now()) - ago, 'messages', '', '', false, n, n, (extract(epoch FROM now() - ago) * 1e6)::bigint, 100 * n
		FROM (VALUES (interval '0', 2), (interval '5 hours', 30), (interval '5 hours 1 minute', 10), (interval '30 hours', 7)) AS v (ago, n)`)
	for shown, want := range map[string]struct{ allowed, refused, span string }{
		"": {"200", "2", "hour"}, "hour": {"200", "2", "hour"}, "day": {"4,200", "42", "day"},
	} {
		chart := "<strong>" + want.allowed + "</strong> allowed and <strong>" + want.refused + "</strong> refused in the last " + want.span
		page := f.get(t, admintest.Address("limit", "name", "messages", "range", shown)).body
		require.Contains(t, page, chart)
		require.Contains(t, page, ": 200 allowed</title>", "of the present minute")
		if shown == "hour" {
			require.Regexp(t, `<rect class="allowed" x="(59|60)" y="3" width="0.8" height="97">`, page, "under the refusals")
			require.Regexp(t, `<rect x="(59|60)" y="0" width="0.8" height="3">`, page)
		}
		require.Contains(t, f.get(t, admintest.Address("", "range", shown)).body, want.allowed+" allowed, <strong>"+want.refused+"</strong> refused")
	}
	require.Contains(t, f.get(t, "/admin/").body, `<a href="./?range=day&amp;search=">day</a>`)
}
