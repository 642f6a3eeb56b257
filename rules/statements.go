package rules

import (
	"strings"

	"github.com/jackc/pgx/v5"
)

// statements are the statements of a schema.
type statements struct {
	bump, notify, note                   string
	putRule, deleteRule                  string
	cutOverrides, endOverride            string
	forgetOverrides, putOverride         string
	endPause, cutPauses, putPause        string
	extendPause, deletePauses            string
	clearTiers, putTier, matchTiers      string
	version                              string
	loadVersion, loadRules, loadHistory  string
	loadOverrides, loadPauses, loadTiers string
	loadLate, history                    string
	listRules, listOverrides, listPauses string
}

// statementsFor returns the statements with the schema's name in place of ratelimit.
func statementsFor(schema string) statements {
	in := strings.NewReplacer("ratelimit.", pgx.Identifier{schema}.Sanitize()+".").Replace
	return statements{
		bump: in(bump), notify: notify, note: in(note),
		putRule: in(putRule), deleteRule: in(deleteRule),
		cutOverrides: in(cutOverrides), endOverride: in(endOverride),
		forgetOverrides: in(forgetOverrides), putOverride: in(putOverride),
		endPause: in(endPause), cutPauses: in(cutPauses), putPause: in(putPause),
		extendPause: in(extendPause), deletePauses: in(deletePauses),
		clearTiers: in(clearTiers), putTier: in(putTier), matchTiers: in(matchTiers),
		version:     in(version),
		loadVersion: in(loadVersion), loadRules: in(loadRules), loadHistory: in(loadHistory),
		loadOverrides: in(loadOverrides), loadPauses: in(loadPauses), loadTiers: in(loadTiers),
		loadLate: in(loadLate), history: in(history),
		listRules: in(listRules), listOverrides: in(listOverrides), listPauses: in(listPauses),
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

	// note inserts nothing when $12 changes of a rule, or of the overrides of a key, are in effect between $13 and $8, when this one
	// begins. A change is not in effect if another took its place.
	note = `INSERT INTO ratelimit.rule_changes (version, position, what, name, plan, key, says, from_us, made_us, author, reason)
		SELECT $1::bigint, $2::integer, $3::text, $4::text, $5::text, $6::text, $7::jsonb, $8::bigint, $9::bigint, $10::text, $11::text
		WHERE (SELECT count(*) FROM (
				SELECT from_us, min(from_us) OVER (ORDER BY version DESC, position DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS until_us
				FROM ratelimit.rule_changes WHERE what = $3 AND what IN ('rule', 'override') AND name = $4 AND plan = $5 AND key = $6) AS stated
			WHERE from_us > $13::bigint AND from_us < $8 AND (until_us IS NULL OR from_us < until_us)) < $12::bigint`

	putRule = `INSERT INTO ratelimit.rules (name, plan, ` + ruleColumns + `, version, from_us)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25)
		ON CONFLICT (name, plan) DO UPDATE SET (` + ruleColumns + `, version, from_us) = (excluded.kind, excluded.rate, excluded.period_us,
			excluded.capacity, excluded.max_reserved, excluded.shards, excluded.start_us, excluded.mode, excluded.slices,
			excluded.resets, excluded.zone, excluded.first_weekday, excluded.first_day, excluded.first_month, excluded.floor,
			excluded.growth, excluded.epoch_us, excluded.apply, excluded.on_change, excluded.unit, excluded.description,
			excluded.version, excluded.from_us)`

	// deleteRule returns a row for the rule, and one if its deletion lies ahead of $3, from when it is deleted now.
	deleteRule = `WITH deleted AS (DELETE FROM ratelimit.rules WHERE name = $1 AND plan = $2 RETURNING from_us)
		SELECT from_us FROM deleted UNION ALL
		SELECT from_us FROM (SELECT from_us FROM ratelimit.rule_changes WHERE what = 'rule' AND name = $1 AND plan = $2
			ORDER BY version DESC, position DESC LIMIT 1) AS last WHERE from_us > $3`

	// cutOverrides takes back what would begin at $3 or later.
	cutOverrides = `DELETE FROM ratelimit.overrides WHERE name = $1 AND key = $2 AND from_us >= $3`

	// endOverride ends at $3 what would go on.
	endOverride = `UPDATE ratelimit.overrides SET until_us = $3
		WHERE name = $1 AND key = $2 AND (until_us IS NULL OR until_us > $3)`

	// forgetOverrides deletes what ended before $3: it is in the history.
	forgetOverrides = `DELETE FROM ratelimit.overrides WHERE name = $1 AND key = $2 AND until_us < $3`

	putOverride = `INSERT INTO ratelimit.overrides (name, key, ` + overrideColumns + `, author, reason, from_us, until_us)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27)`

	// endPause ends at $3 the pause that is under way then.
	endPause = `UPDATE ratelimit.pauses SET until_us = $3 WHERE name = $1 AND key = $2 AND from_us < $3 AND until_us > $3`

	// cutPauses deletes the pauses that begin between $3 and $4, and the pauses that have ended at $5. The history has them.
	cutPauses = `DELETE FROM ratelimit.pauses WHERE name = $1 AND key = $2 AND (from_us >= $3 AND from_us < $4 OR until_us <= $5)`

	putPause = `INSERT INTO ratelimit.pauses (name, key, author, reason, from_us, until_us) VALUES ($1, $2, $3, $4, $5, $6)`

	// extendPause replaces the pauses that meet the one from $5 to $6 by a single pause that covers them all, and adds it to the
	// history. It changes nothing if one of them covers all of that time.
	extendPause = `WITH met AS (
			SELECT from_us, until_us FROM ratelimit.pauses WHERE name = $1 AND key = $2 AND from_us <= $6 AND until_us >= $5),
		deleted AS (
			DELETE FROM ratelimit.pauses WHERE name = $1 AND key = $2 AND from_us <= $6 AND until_us >= $5
				AND NOT EXISTS (SELECT FROM met WHERE from_us <= $5 AND until_us >= $6)
			RETURNING from_us, until_us),
		put AS (
			INSERT INTO ratelimit.pauses (name, key, author, reason, from_us, until_us)
			SELECT $1, $2, $3, $4, least($5, min(from_us)), greatest($6, max(until_us)) FROM deleted
			HAVING NOT EXISTS (SELECT FROM met WHERE from_us <= $5 AND until_us >= $6)
			RETURNING from_us, until_us)
		INSERT INTO ratelimit.rule_changes (version, position, what, name, plan, key, says, from_us, made_us, author, reason)
		SELECT $7::bigint, $8::int, 'pause', $1, '', $2, jsonb_build_object('until_us', until_us), from_us, $9::bigint, $3, $4 FROM put`

	// deletePauses deletes the current pause and the later pauses.
	deletePauses = `DELETE FROM ratelimit.pauses WHERE name = $1 AND key = $2`

	clearTiers = `DELETE FROM ratelimit.tiers`

	putTier = `INSERT INTO ratelimit.tiers (position, name, key, route, conditions, cost_source, fixed_cost, default_cost)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`

	matchTiers = `UPDATE ratelimit.rules_version SET tiers_match = $1`
)

const (
	policyColumns = `kind, rate, period_us, capacity, max_reserved, shards, start_us, mode,
		slices, resets, zone, first_weekday, first_day, first_month, floor, growth, epoch_us, apply`
	ruleColumns     = policyColumns + `, on_change, unit, description`
	overrideColumns = `multiplier, plan, ` + policyColumns + `, on_change`
)

// What a Set and a Store read.
const (
	version = `SELECT coalesce((SELECT version FROM ratelimit.rules_version), 0)`

	loadVersion = `SELECT coalesce(max(version), 0), coalesce(max(tiers_match), 'all'),
		(extract(epoch FROM clock_timestamp()) * 1000000)::bigint FROM ratelimit.rules_version`

	loadRules = `SELECT name, plan, from_us, ` + ruleColumns + ` FROM ratelimit.rules`

	// loadHistory returns of each rule the changes that lie ahead at $2, and the last $1 of those that have begun, the oldest
	// first. Before them it returns the slowest of the others: its n, which counts back from the last that has begun, is above
	// $1. It leaves out a change whose place another took before it began.
	loadHistory = `WITH stated AS (
			SELECT name, plan, from_us, says, min(from_us) OVER (PARTITION BY name, plan
				ORDER BY version DESC, position DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS until_us
			FROM ratelimit.rule_changes WHERE what = 'rule'),
		changes AS (
			SELECT name, plan, from_us, says, row_number() OVER (PARTITION BY name, plan ORDER BY from_us DESC)
				- count(*) FILTER (WHERE from_us > $2) OVER (PARTITION BY name, plan) AS n
			FROM stated WHERE until_us IS NULL OR from_us < until_us),
		slowest AS (
			SELECT DISTINCT ON (name, plan) * FROM changes
			WHERE n > $1 AND jsonb_typeof(says -> 'rate') = 'number' AND jsonb_typeof(says -> 'period_us') = 'number'
			ORDER BY name, plan, (says ->> 'rate')::numeric / nullif((says ->> 'period_us')::numeric, 0))
		SELECT * FROM changes WHERE n <= $1 UNION ALL SELECT * FROM slowest ORDER BY name, plan, n DESC`

	// loadOverrides returns what ended at $1 or later, or goes on.
	loadOverrides = `SELECT name, key, from_us, until_us, ` + overrideColumns + ` FROM ratelimit.overrides
		WHERE until_us IS NULL OR until_us >= $1 ORDER BY name, key, from_us`

	loadPauses = `SELECT name, key, from_us, until_us, reason FROM ratelimit.pauses WHERE until_us > $1 ORDER BY name, key, from_us`

	loadTiers = `SELECT name, key, route, conditions, cost_source, fixed_cost, default_cost FROM ratelimit.tiers ORDER BY position`

	// loadLate returns how long before $2 the changes after the version $1 began, and $3 when there is none.
	loadLate = `SELECT coalesce(max($2::bigint - from_us), $3::bigint) FROM ratelimit.rule_changes WHERE version > $1 AND what IN ('rule', 'override')`

	// listRules returns those of the names from $1 to $2, at most $3 of them; null: all.
	listRules = `SELECT name, plan, from_us, ` + ruleColumns + `, version FROM ratelimit.rules
		WHERE name BETWEEN $1 AND $2 ORDER BY name, plan LIMIT $3`

	// listOverrides returns those of the names from $1 to $2 and the keys from $3 to $4 that come after the name $5 and the key
	// $6, at most $7 of them; null: all.
	listOverrides = `SELECT name, key, from_us, until_us, ` + overrideColumns + `, author, reason FROM ratelimit.overrides
		WHERE name BETWEEN $1 AND $2 AND key BETWEEN $3 AND $4 AND (name, key) > ($5, $6)
		ORDER BY name, key, from_us LIMIT $7`

	// listPauses returns what listOverrides does of the pauses, and those of the limits themselves.
	listPauses = `SELECT name, key, from_us, until_us, reason, author FROM ratelimit.pauses
		WHERE name BETWEEN $1 AND $2 AND (key BETWEEN $3 AND $4 OR key = '') AND (name, key) > ($5, $6)
		ORDER BY name, key, from_us LIMIT $7`

	// history returns the newest $6 entries before the version $1.
	history = `SELECT version, what, name, plan, key, says, from_us, made_us, author, reason FROM ratelimit.rule_changes
		WHERE version < $1 AND ($2::text IS NULL OR name = $2) AND ($3::text IS NULL OR plan = $3)
			AND ($4::text IS NULL OR key = $4) AND ($5::text IS NULL OR what = $5)
		ORDER BY version DESC, position DESC LIMIT $6`
)
