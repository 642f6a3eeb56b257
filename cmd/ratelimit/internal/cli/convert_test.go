package cli_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestConvertPrintsARulesFile promises that validate accepts the converted file.
func TestConvertPrintsARulesFile(t *testing.T) {
	t.Parallel()
	f := &fixture{}
	other := file(t, "limits.json", `{"name": "global-rps", "limit_keys": ["ip:address"], "algorithm": "token_bucket", "algorithm_config": {"rps": 5, "burst": 10}}`)
	converted := f.ok(t, "rules", "convert", "-f", other)
	require.Equal(t, `match: all
rules:
  - limit: global-rps
    kind: token bucket
    rate: 5
    period: 1s
    capacity: 10
tiers:
  - limit: global-rps
    key: '{address}'
`, converted)
	require.Contains(t, f.ok(t, "rules", "validate", "-f", file(t, "rules.yaml", converted)), "valid")
	require.Contains(t, f.ok(t, "rules", "validate", "-f", file(t, "rules.json", f.ok(t, "rules", "convert", "--file", other, "--output", "json"))), "valid")
	claims := f.run(t, "rules", "convert", "-f", file(t, "claims.json", `{"name": "orgs", "limit_keys": ["jwt:org_id"], "algorithm": "token_bucket", "algorithm_config": {"rps": 5, "burst": 10}}`))
	require.Equal(t, 0, claims.code)
	require.Contains(t, claims.out, "key: '{jwt:org_id}'")
	require.Contains(t, claims.err, "note: tiers name attributes that a program must declare in rules.SiteConfig: jwt:org_id")
	require.Contains(t, f.fails(t, 2, "rules", "convert"), "no file is named")
	require.Contains(t, f.fails(t, 2, "rules", "convert", "-f", "no-such.json"), "no such file")
	require.Contains(t, f.fails(t, 2, "rules", "convert", "-f", file(t, "bad.yaml", "- {rate: 1}")), "it has no name or no limit_keys")
}
