// Package property_test checks properties of packages for drawn values.
package property_test

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// Any words and numbers that a document may hold are written so that they are read again.
func TestWriteAnythingIsRead(t *testing.T) {
	t.Parallel()
	words := rapid.OneOf(
		rapid.String().Filter(func(s string) bool { return !strings.Contains(s, "\x00") && len(s) < 500 }),
		rapid.SampledFrom([]string{
			"null", "~", "true", "no", "on", "1", "1e3", "0x1", ".inf", "-", "- a", "a: b", "a #b", "#a", " a ", "a\nb", "\t", "'", "\"", "\\", "{a}", "[", "*a",
			"&a", "!a", "%a", "@a", "|", ">", "?", ":", "a:", "\u2028", "\ufeff", "\U0001F600", "\u0085", "\x7f", "---", "...", "<<",
		}))
	amount := rapid.OneOf(rapid.Just(0.0), rapid.Float64Range(1, 1000))
	rapid.Check(t, func(t *rapid.T) {
		d := &rules.Document{
			Rules: []rules.Rule{{
				Limit: "limit", Plan: rapid.StringMatching(`[A-Za-z0-9_.:/-]{0,64}`).Draw(t, "plan"),
				Policy: ratelimit.TokenBucket{
					Rate: rapid.Float64Range(1, 1000).Draw(t, "rate"), Period: time.Microsecond * time.Duration(rapid.Int64Range(1, 1e9).Draw(t, "period")),
					Capacity: amount.Draw(t, "capacity"), MaxReserved: amount.Draw(t, "max reserved"),
				},
				Mode:     rapid.SampledFrom([]ratelimit.Mode{"", ratelimit.Shadow, ratelimit.Off}).Draw(t, "mode"),
				OnChange: rapid.SampledFrom([]ratelimit.OnChange{"", ratelimit.AddTokens}).Draw(t, "on change"),
				Unit:     rapid.StringN(0, 10, 64).Filter(func(s string) bool { return !strings.Contains(s, "\x00") }).Draw(t, "unit"), Description: words.Draw(t, "description"),
			}},
			Tiers: rules.TierSet{
				Match: rapid.SampledFrom([]rules.Match{rules.MatchAll, rules.MatchFirst}).Draw(t, "match"),
				Tiers: []rules.Tier{{Limit: "another", Route: words.Draw(t, "route"), When: map[string]string{"plan": words.Draw(t, "condition")}}},
			},
			Overrides: []rules.Override{{Limit: "limit", Key: rapid.StringN(0, 64, 256).Filter(func(s string) bool { return !strings.Contains(s, "\x00") }).Draw(t, "key"), Multiplier: 2}},
		}
		if bucket := d.Rules[0].Policy.(ratelimit.TokenBucket); bucket.Capacity == bucket.Rate {
			bucket.Capacity = 0 // the text leaves out the default
			d.Rules[0].Policy = bucket
		}
		text, err := d.YAML()
		require.NoError(t, err)
		again, err := rules.Read(bytes.NewReader(text))
		require.NoError(t, err, "%s", text)
		require.Equal(t, d, again, "%s", text)
	})
}

// Two requests with different attributes never have the same key, for any pattern and attributes.
func TestTierKeysDiffer(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringOfN(rapid.SampledFrom([]rune(`a/\|`)), 1, 4, -1)
		separator := rapid.SampledFrom([]string{"/", "|", "a", "//", "/|", ":/"})
		pattern := "{tenant}" + separator.Draw(t, "first") + "{user}" + separator.Draw(t, "second") + "{address}"
		key := func(of rules.Attributes) ratelimit.Request {
			set, err := rules.SetOf(rules.Document{
				Rules: []rules.Rule{{Limit: "calls", Policy: ratelimit.PerHour(10)}}, Tiers: rules.TierSet{Tiers: []rules.Tier{{Limit: "calls", Key: pattern}}},
			})
			require.NoError(t, err)
			site, err := rules.NewSite(set, rules.SiteConfig{})
			require.NoError(t, err)
			requests, err := site.Requests(of, nil)
			require.NoError(t, err)
			return requests[0]
		}
		attributes := func(of string) rules.Attributes {
			return rules.Attributes{Tenant: text.Draw(t, of+" tenant"), User: text.Draw(t, of+" user"), Address: text.Draw(t, of+" address")}
		}
		one, other := attributes("one"), attributes("other")
		same := one.Tenant == other.Tenant && one.User == other.User && one.Address == other.Address
		require.Equal(t, same, key(one) == key(other), "%s of %+v and %+v", pattern, one, other)
	})
}
