package ratelimit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// oneRule is a source with one rule.
type oneRule struct{ rule *Ruling }

func (o oneRule) RulingFor(Limit, string, string) *Ruling { return o.rule }
func (o oneRule) RulingsOf(string) []*Ruling              { return []*Ruling{o.rule} }

// BenchmarkPlan measures the work of a call before it is sent: without Config.Policies, without a rule, with a rule, and with a
// rule that is about to change.
func BenchmarkPlan(b *testing.B) {
	limit := Define("api", TokenBucket{Rate: 10, Period: time.Second, Capacity: 20})
	rule := func(eras ...Era) Policies {
		made, err := NewRuling(limit, RulingConfig{Eras: eras})
		require.NoError(b, err)
		return oneRule{made}
	}
	for name, source := range map[string]Policies{
		"NoSource": nil, "NoRule": oneRule{}, "Rule": rule(Era{}, Era{From: time.Unix(1, 0), Policy: PerSecond(5)}),
		"Pending": rule(Era{}, Era{From: time.Now().Add(time.Hour), Policy: PerSecond(5)}),
	} {
		b.Run(name, func(b *testing.B) {
			l := &Limiter{config: Config{Policies: source}, policies: &policies{}}
			requests := []Request{limit.For("alice")}
			b.ReportAllocs()
			for b.Loop() {
				c := &call{}
				if err := c.plan.arrange(b.Context(), l, verbTake, requests); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
