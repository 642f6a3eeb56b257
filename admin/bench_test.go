package admin_test

import (
	"net/http"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/admintest"
)

var fault = regexp.MustCompile(`<p class="fault">[^<]*`)

// BenchmarkPage loads each page with 1,000,000 buckets, 100,000 reservations, 600,000 rows of refusals in the last hour,
// 20,000 overrides and 100,000 changes in the tables:
//
//	go test ./admin -run xxx -bench Page -benchtime 5x
//
// docs/admin.md has the figures.
func BenchmarkPage(b *testing.B) { benchmarkPages(b, `VACUUM ANALYZE`) } // as autovacuum has done by then

// BenchmarkPageOfNewTables is BenchmarkPage before the server knows anything of the tables.
func BenchmarkPageOfNewTables(b *testing.B) { benchmarkPages(b) }

func benchmarkPages(b *testing.B, first ...string) {
	b.Helper()
	f := setup(b)
	id := f.Furnish(b)
	for _, sql := range append([]string{
		`INSERT INTO ratelimit.buckets (name, key, shard, value, ts)
			SELECT 'messages', 'user-' || i, 0, CASE WHEN i % 50000 = 0 THEN -50 ELSE i % 100 END, (extract(epoch FROM now()) * 1000000)::bigint
			FROM generate_series(1, 1000000) AS i`,
		`INSERT INTO ratelimit.reservations
			SELECT gen_random_uuid(), CASE WHEN i % 10 = 0 THEN 'open' ELSE 'settled' END, t, NULL, NULL, t + 86400000000, false,
				'{messages}', ARRAY['user-' || i], '{1}', '{100}', '{1}', '{60000000}', '{1}', '{0}', '{-1e12}'
			FROM generate_series(1, 100000) AS i, LATERAL (SELECT ((extract(epoch FROM now()) + i - 50000) * 1000000)::bigint AS t) AS at`,
		`INSERT INTO ratelimit.refusals
			SELECT date_trunc('minute', now()) - (i % 60) * interval '1 minute', 'messages', 'POST /x', 'user-' || i, false, 1 + i % 7, 1, 1
			FROM generate_series(1, 600000) AS i`,
		`INSERT INTO ratelimit.rules (version, of, name, key, says, from_us, replaced_us, author, reason)
			SELECT 1000 + i, 'override', 'messages', 'user-' || i, '{"multiplier": 2}', 1, CASE WHEN i > 20000 THEN 2 END, 'ana', 'x'
			FROM generate_series(1, 100000) AS i`,
	}, first...) {
		f.Exec(b, sql)
	}
	f.Load(b)
	pages := admintest.Pages(id)
	pages["limitMiddle"] = admintest.Address("limit", "name", "messages", "after", "user-5")
	pages["limitPrefix"] = admintest.Address("limit", "name", "messages", "prefix", "user-9999")
	pages["keyOfMany"] = admintest.Address("key", "limit", "messages", "key", "user-500000")
	pages["openOfLimit"] = admintest.Address("reservations", "state", "open", "limit", "messages")
	pages["owedOfMany"] = admintest.Address("owed", "limit", "messages")
	for name, page := range pages {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				got := f.get(b, page)
				require.Equal(b, http.StatusOK, got.status)
				require.Empty(b, fault.FindAllString(got.body, -1))
			}
		})
	}
}
