package inspect

import (
	_ "embed"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// nowSQL returns what time it is.
const nowSQL = `SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint`

// The statements, for the default schema.
var (
	//go:embed sql/limits.sql
	limitsSQL string
	//go:embed sql/buckets.sql
	bucketsSQL string
	//go:embed sql/bucket.sql
	bucketSQL string
	//go:embed sql/reservations.sql
	reservationsSQL string
	//go:embed sql/reservation.sql
	reservationSQL string
	//go:embed sql/used.sql
	usedSQL string
	//go:embed sql/seen.sql
	seenSQL string
	//go:embed sql/upstream.sql
	upstreamSQL string
	//go:embed sql/refusals.sql
	refusalsSQL string
	//go:embed sql/refusals_by_limit.sql
	refusalsByLimitSQL string
	//go:embed sql/refusals_since.sql
	refusalsSinceSQL string
)

// statements are the SQL texts for one schema.
type statements struct {
	limits, buckets, bucket   string
	reservations, reservation string
	refusals, refusalsSince   string
	refusalsByLimit, upstream string
	seen, used, hidden        string
}

func newStatements(schema string) statements {
	in := strings.NewReplacer("ratelimit.", pgx.Identifier{schema}.Sanitize()+".").Replace
	return statements{
		limits: in(limitsSQL), buckets: in(bucketsSQL), bucket: in(bucketSQL),
		reservations: in(reservationsSQL), reservation: in(reservationSQL),
		refusals: in(refusalsSQL), refusalsSince: in(refusalsSinceSQL),
		refusalsByLimit: in(refusalsByLimitSQL), upstream: in(upstreamSQL), seen: in(seenSQL), used: in(usedSQL),
		hidden: "SELECT " + pgerr.Hidden("'"+strings.ReplaceAll(schema, "'", "''")+"'", "current_user", "buckets", "leases",
			"reservations", "refusals", "upstreams"),
	}
}
