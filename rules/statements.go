package rules

import (
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// statements are the statements of a schema.
type statements struct {
	before, bump, replace, state, met, notify string
	hashed, versionAndTime, hidden            string
	schema                                    string
	load, list, history, earlier              string
}

// statementsFor returns the statements with the schema's name in place of ratelimit.
func statementsFor(schema string) statements {
	in := strings.NewReplacer("ratelimit.", pgx.Identifier{schema}.Sanitize()+".").Replace
	here := "'" + strings.ReplaceAll(schema, "'", "''") + "'"
	seen := func(text string) string {
		return in(strings.ReplaceAll(text, "$hidden", pgerr.Hidden(here, "current_user", "rules", "rules_version",
			"fingerprint")))
	}
	return statements{
		before: in(before), bump: in(bump), replace: in(replace), state: in(state), met: in(met), notify: notify,
		hashed:         in(hashed),
		versionAndTime: seen(versionAndTime), hidden: seen(hidden), schema: schema, load: in(loadRows),
		list: in(list), history: in(history), earlier: in(earlier),
	}
}

// What a Store writes.
const (
	// bump adds 1 to the version, and locks it to the end of the transaction. It returns the new version, and the time
	// once it has the lock, in microseconds since 1970.
	bump = `INSERT INTO ratelimit.rules_version AS v (id, version) VALUES (true, 1)
		ON CONFLICT (id) DO UPDATE SET version = v.version + 1
		RETURNING v.version, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint`

	notify = `SELECT pg_notify($1, $2::bigint::text)`

	// replace ends at $5 the statements about a thing that begin before $6 and have not ended by then. It returns a row
	// for each that is not a removal.
	replace = `WITH replaced AS (
			UPDATE ratelimit.rules SET replaced_us = $5::bigint
			WHERE of = $1::text AND name = $2::text AND plan = $3::text AND key = $4::text AND from_us < $6::bigint
				AND (end_us > greatest($5, from_us) OR end_us IS NULL)
			RETURNING says)
		SELECT FROM replaced WHERE says IS NOT NULL`

	// state adds a row. It adds nothing if $14 statements about the same thing begin between $15 and $8, and hold then.
	state = `INSERT INTO ratelimit.rules (` + columns + `)
		SELECT $1::bigint, $2::integer, $3::text, $4::text, $5::text, $6::text, $7::jsonb, $8::bigint, $9::bigint, $10::bigint,
			$11::bigint, $12::text, $13::text
		WHERE $3 NOT IN ('rule', 'override') OR $14::integer > (
			SELECT count(*) FROM ratelimit.rules WHERE of = $3 AND name = $4 AND plan = $5 AND key = $6
				AND from_us > $15::bigint AND from_us < $8 AND (replaced_us IS NULL OR replaced_us > from_us))`

	// met returns the begin and the end of the time from $3 to $4 together with all pauses of a key, or of a limit, that
	// meet it and are not over at $5. It also returns whether one of the pauses covers the time from $3 to $4.
	met = `SELECT least(min(from_us), $3), greatest(max(end_us), $4), coalesce(bool_or(from_us <= $3 AND end_us >= $4), false)
		FROM ratelimit.rules
		WHERE of = 'pause' AND name = $1::text AND plan = '' AND key = $2::text AND says IS NOT NULL
			AND from_us <= $4::bigint AND end_us >= $3::bigint AND end_us > greatest(from_us, $5::bigint)`
)

// before returns the rules of the limits $1 that hold until $2 or longer.
const before = `SELECT ` + columns + ` FROM ratelimit.rules
	WHERE of = 'rule' AND name = ANY($1::text[]) AND key = '' AND says IS NOT NULL AND from_us < $2::bigint
		AND (end_us >= $2 AND end_us > from_us OR end_us IS NULL)`

// hashed returns whether programs store keys as HMACs.
const hashed = `SELECT EXISTS (SELECT FROM ratelimit.fingerprint WHERE hash_key <> 'none')`

// columns are the columns of a row, in the order of its fields.
const columns = `version, position, of, name, plan, key, says, from_us, until_us, replaced_us, made_us, author, reason`

// What a Set and a Store read.
const (
	versionAndTime = `SELECT coalesce(max(version), 0), (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, $hidden FROM ratelimit.rules_version`

	// hidden returns the tables whose rows may be hidden. The statement above returns them, too.
	hidden = `SELECT $hidden`

	// loadRows returns of each rule the last $1 statements, the last two about tiers, the overrides that have not ended
	// before $2 and the pauses that have not ended before $3, with those that have replaced one of them, in the order in
	// which they were made. It leaves out rules that never hold, as another took their place before they began.
	loadRows = `SELECT ` + columns + ` FROM (
			SELECT *, row_number() OVER (PARTITION BY name, plan ORDER BY version DESC, position DESC) AS n FROM ratelimit.rules
			WHERE of = 'rule' AND key = '' AND (replaced_us IS NULL OR replaced_us > from_us)) AS last WHERE n <= $1
		UNION ALL (SELECT ` + columns + ` FROM ratelimit.rules
			WHERE of = 'tiers' AND name = '' AND key = '' AND plan = '' ORDER BY version DESC, position DESC LIMIT 2)
		UNION ALL SELECT ` + columns + ` FROM ratelimit.rules
			WHERE of IN ('override', 'pause') AND (end_us >= $2::bigint AND (of = 'override' OR end_us > $3::bigint) OR end_us IS NULL)
		UNION ALL SELECT ` + columns + ` FROM (
				SELECT of AS p_of, name AS p_name, key AS p_key, min(version) AS p_version, max(coalesce(end_us, 9223372036854775807)) AS p_end
				FROM ratelimit.rules
				WHERE of IN ('override', 'pause') AND says IS NOT NULL AND (end_us >= $2 AND (of = 'override' OR end_us > $3) OR end_us IS NULL)
				GROUP BY of, name, key) AS p
			JOIN ratelimit.rules ON of = p_of AND name = p_name AND key = p_key AND plan = '' AND version >= p_version
				AND from_us < p_end AND (end_us < $2 OR of = 'pause' AND end_us <= $3)
		ORDER BY version, position`

	// list returns the statements about things of a kind that hold at $8 or later: of the names from $2 to $3 and the keys
	// from $4 to $5, and the pauses of limits, that come after the name $6 and the key $7, at most $9 of them; null: all.
	list = `SELECT ` + columns + ` FROM ratelimit.rules
		WHERE of = $1 AND says IS NOT NULL AND name BETWEEN $2 AND $3 AND (key BETWEEN $4 AND $5 OR of = 'pause' AND key = '')
			AND (name, key) > ($6, $7) AND (end_us > greatest(from_us, $8::bigint) OR end_us IS NULL)
		ORDER BY name, key, plan, from_us LIMIT $9`

	// earlier returns the last row about a thing before the version $5 and the position $6. It leaves out removals that
	// were to take effect after $7, because until then the row before them did.
	earlier = `SELECT ` + columns + ` FROM ratelimit.rules
		WHERE of = $1::text AND name = $2::text AND plan = $3::text AND key = $4::text
			AND (version < $5::bigint OR version = $5 AND position < $6::integer) AND (says IS NOT NULL OR from_us <= $7::bigint)
		ORDER BY version DESC, position DESC LIMIT 1`

	// history returns the newest $6 rows before the version $1.
	history = `SELECT ` + columns + ` FROM ratelimit.rules
		WHERE version < $1 AND ($2::text IS NULL OR name = $2) AND ($3::text IS NULL OR plan = $3)
			AND ($4::text IS NULL OR key = $4) AND ($5::text IS NULL OR of = $5)
		ORDER BY version DESC, position DESC LIMIT $6`
)
