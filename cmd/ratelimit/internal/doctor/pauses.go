package doctor

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// lookAtPauses finds the pauses in effect whose limits are unknown to the tables, because their names may be misspelt.
func (e *examination) lookAtPauses(ctx context.Context, tx pgx.Tx) ([]Finding, error) {
	rows, err := tx.Query(ctx, fmt.Sprintf(`
		WITH stated AS (
			SELECT * FROM %[1]s WHERE says IS NOT NULL AND coalesce(end_us > extract(epoch FROM now()) * 1000000, true)
		)
		SELECT DISTINCT p.name FROM stated p
		WHERE p.of = 'pause' AND p.from_us <= extract(epoch FROM now()) * 1000000
			AND NOT EXISTS (SELECT FROM stated s WHERE s.of IN ('rule', 'override') AND s.name = p.name
				OR s.of = 'tiers' AND strpos(s.says::text, '"' || p.name || '"') > 0)
			AND NOT EXISTS (SELECT FROM %[2]s b WHERE b.name = p.name)
			AND NOT EXISTS (SELECT FROM %[3]s r WHERE r.name = p.name)
		ORDER BY 1`, e.quoted("rules"), e.quoted("buckets"), e.quoted("refusals")))
	if err != nil {
		return nil, err
	}
	limits, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, err
	}
	if len(limits) == 0 {
		return ok("No pause is of a limit that the tables do not know."), nil
	}
	return warning("If a name is misspelt, pause the right limit, and end this pause with ratelimit resume. If only "+
		"programs know the limit, store a rule for it.",
		"A pause is in effect of limits that have neither a rule nor a bucket: %s.", strings.Join(limits, ", ")), nil
}
