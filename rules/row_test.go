package rules_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// TestTableRejectsRows promises that the table rejects rows written by hand that no program could place.
func TestTableRejectsRows(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	version := 0
	insert := func(columns, values string) error {
		version++
		_, err := pool.Exec(t.Context(), fmt.Sprintf(`INSERT INTO ratelimit.rules (version, author, reason, %s) VALUES (%d, 'ana', 'why', %s)`, columns, version, values))
		return err
	}
	for columns, c := range map[string]struct{ good, bad []string }{
		"of, name": {
			[]string{`'rule', 'a'`, `'tiers', ''`, `'override', repeat('a', 64)`},
			[]string{`'rules', 'a'`, `'rule', ''`, `'rule', 'ä'`, `'rule', E'a\n'`, `'rule', repeat('a', 65)`, `'rule', 'a b'`, `'rule', NULL`},
		},
		"of, name, plan": {[]string{`'rule', 'a', 'pro'`}, []string{`'rule', 'a', 'p q'`, `'rule', 'a', repeat('p', 65)`, `'override', 'a', 'pro'`, `'tiers', '', 'pro'`}},
		"of, name, key":  {[]string{`'override', 'a', repeat('k', 256)`, `'override', 'a', ''`}, []string{`'override', 'a', repeat('k', 257)`, `'rule', 'a', 'k'`, `'tiers', '', 'k'`}},
		"of, name, says": {[]string{`'rule', 'a', '{}'`, `'rule', 'a', NULL`}, []string{`'rule', 'a', '[]'`, `'rule', 'a', '1'`, `'pause', 'a', '{}'`}},
		"of, name, says, from_us, until_us": {
			[]string{`'override', 'a', '{}', 1, 2`, `'pause', 'a', '{}', 1, 253402300799999999`},
			[]string{`'override', 'a', '{}', 2, 2`, `'override', 'a', '{}', 2, 1`, `'override', 'a', '{}', -62135596800000001, 2`, `'pause', 'a', '{}', 1, 253402300800000000`},
		},
	} {
		for _, values := range c.good {
			require.NoError(t, insert(columns, values), values)
		}
		for _, values := range c.bad {
			require.Error(t, insert(columns, values), values)
		}
	}
	for _, who := range []string{`'', 'why'`, `'ana', E' \t'`, `NULL, 'why'`, `'ana', repeat('w', 2001)`, `repeat('a', 257), 'why'`} {
		_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.rules (version, of, name, author, reason) VALUES (0, 'rule', 'a', `+who+`)`)
		require.Error(t, err, who)
	}
	_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.rules_version (version) VALUES (1)`)
	require.NoError(t, err)
	for _, values := range []string{`true, 2`, `false, 2`, `NULL, 2`} {
		_, err = pool.Exec(t.Context(), `INSERT INTO ratelimit.rules_version (id, version) VALUES (`+values+`)`)
		require.Error(t, err, "there is one row")
	}
}
