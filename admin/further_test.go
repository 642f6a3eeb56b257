package admin_test

import (
	"fmt"
	"html"
	"net/http"
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/admintest"
)

var (
	pagerLink = regexp.MustCompile(`<a href="([^"]+)">(?:Continue|Next|Older)</a>`)
	keyLink   = regexp.MustCompile(`<a href="key\?key=([^&"]+)&amp;limit=messages">`)
)

// found returns the texts that a pattern finds in a page.
func found(page string, pattern *regexp.Regexp) (all []string) {
	for _, match := range pattern.FindAllStringSubmatch(page, -1) {
		all = append(all, match[1])
	}
	return all
}

// further follows the links that lead on from a page, and returns what each page has of something.
func (f *fixture) further(page string, thing *regexp.Regexp) (pages [][]string) {
	f.Helper()
	for range 50 {
		got := f.get(page)
		require.Equal(f, http.StatusOK, got.status, page)
		require.NotContains(f, got.body, `class="fault"`, page)
		pages = append(pages, found(got.body, thing))
		next := pagerLink.FindStringSubmatch(got.body)
		if next == nil {
			return pages
		}
		page = "/admin/" + html.UnescapeString(next[1])
	}
	require.Fail(f, "the pages have no end", page)
	return nil
}

// TestMoreThanAPageShows follows the links of pages that do not show everything.
func TestMoreThanAPageShows(t *testing.T) {
	t.Parallel()
	numbered := func(format string, first, last int) (all []string) {
		for n := first; n <= last; n++ {
			all = append(all, fmt.Sprintf(format, n))
		}
		return all
	}
	twenty := numbered("user-%02d", 21, 30)
	slices.Reverse(twenty)
	for name, test := range map[string]struct {
		rows  string // that are written
		page  string
		first []string // the keys that the first page has; nil: as many as it found in time
		all   []string // and the keys of all pages
	}{
		"Refused": {
			`INSERT INTO ratelimit.refusals SELECT date_trunc('minute', now()) - interval '1 minute', 'messages', '', 'user-' || to_char(i, 'FM00'), false, i, i, 1
			FROM generate_series(1, 30) AS i`,
			admintest.Address("limit", "name", "messages"), twenty, twenty,
		},
		// A page ends before a key whose pauses go on behind it.
		"Pauses": {
			`INSERT INTO ratelimit.rules (version, of, name, key, says, author, reason, from_us, until_us)
			SELECT 100 + i, 'pause', 'messages', 'user-' || to_char(least(i - 1, 49), 'FM00'), '{}', 'ana', 'x', from_us, from_us + 1
			FROM generate_series(1, 52) AS i, LATERAL (SELECT ((extract(epoch FROM now()) + 3600 * i) * 1000000)::bigint AS from_us) AS at`,
			"/admin/overrides", numbered("user-%02d", 0, 48), append(numbered("user-%02d", 0, 49), "user-49", "user-49"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			f.Exec(t, test.rows)
			pages := f.further(test.page, keyLink)
			require.Equal(t, test.all, slices.Concat(pages...))
			if test.first != nil {
				require.Equal(t, test.first, pages[0])
			}
			if name == "Refused" {
				require.Contains(t, f.page("limit", "name", "messages"), `href="now?limit=messages&amp;range=1h"`)
				require.Len(t, found(f.page("now", "limit", "messages", "range", "1h"), keyLink), 30)
			}
		})
	}
}
