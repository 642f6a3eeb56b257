package admin_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/admintest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// TestPagesOfAMillionBuckets prints how long each page takes with a million buckets, 600,000 rows of refusals, 100,000
// reservations and 20,000 overrides. Of five loads of each, the fastest takes less than a second. docs/admin.md has the
// figures.
func TestPagesOfAMillionBuckets(t *testing.T) { //nolint:paralleltest // it measures
	testkit.Nightly(t, "writes 1.7 million rows, and measures")
	f := setup(t)
	id := f.Furnish(t)
	for _, sql := range []string{
		`INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity)
			SELECT CASE WHEN i % 2 = 0 THEN 'messages' ELSE 'limit-' || i % 40 END, 'user-' || to_char(i, 'FM0000000'), 0,
				CASE WHEN i % 1000 = 0 THEN -50 ELSE i % 100 END, (extract(epoch FROM now()) * 1000000)::bigint - i * 1000, 100
			FROM generate_series(1, 1000000) AS i`,
		`INSERT INTO ratelimit.refusals (minute, name, route, key, shadow, refused, cost, last_us)
			SELECT date_trunc('minute', now()) - i % 60 * interval '1 minute', 'messages', '', 'user-' || to_char(i, 'FM0000000'), false, i % 9, i % 9,
				(extract(epoch FROM now()) * 1000000)::bigint FROM generate_series(1, 600000) AS i`,
		`INSERT INTO ratelimit.reservations (id, ready_us, expires_us, cost, capacity, rate, steps, step_us, phase_us, lowest, paid_us, release, state, name, key)
			SELECT gen_random_uuid(), us, us + 86400000000, 5, 100, 60, 1, 1, 0, 0, us, false, 'open', 'messages', 'user-' || to_char(i, 'FM0000000')
			FROM generate_series(1, 100000) AS i, LATERAL (SELECT (extract(epoch FROM now()) * 1000000)::bigint + i * 1000 AS us) AS at`,
		`INSERT INTO ratelimit.rules (version, of, name, key, says, author, reason, from_us)
			SELECT 1000 + i, 'override', 'messages', 'user-' || to_char(i, 'FM0000000'), '{"multiplier": 2}', 'ana', 'x', 0 FROM generate_series(1, 20000) AS i`,
	} {
		f.Exec(t, sql)
	}
	f.Load(t)
	pages := admintest.Pages(id)
	for name, pairs := range map[string][]string{
		"prefix":   {"limit", "name", "messages", "prefix", "user-05"},
		"a week":   {"limit", "name", "messages", "range", "7d"},
		"key, 7 d": {"key", "limit", "messages", "key", "user-0000100", "range", "7d"},
		"a user":   {"key", "key", "user-0000100"},
		"names":    {"", "search", "limit-1"},
		"now, 7 d": {"now", "range", "7d"},
	} {
		pages[name] = admintest.Address(pairs[0], pairs[1:]...)
	}
	for _, when := range []string{"before VACUUM ANALYZE", "after it"} {
		if when == "after it" {
			f.Exec(t, `VACUUM ANALYZE`)
		}
		for name, page := range pages {
			fastest, took := time.Hour, ""
			for range 5 {
				began := time.Now()
				got := f.getOnce(page)
				require.Equal(t, http.StatusOK, got.status, name)
				took += fmt.Sprintf(" %d", time.Since(began).Milliseconds())
				if !strings.Contains(got.body, tookTooLong) {
					fastest = min(fastest, time.Since(began))
				}
			}
			began := time.Now()
			found := f.post("/admin/find", "typed", "user-0000100")
			t.Logf("%-22s %-14s%s ms; search %d ms", when, name, took, time.Since(began).Milliseconds())
			require.Equal(t, http.StatusSeeOther, found.status)
			assert.Less(t, fastest, time.Second, "%s %s", name, when)
		}
	}
}
