package admin

import (
	"errors"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// FuzzForm holds a form that somebody has filled in to what is written into a form again: an error of the form, or a rule
// that is read back as it is.
func FuzzForm(f *testing.F) {
	for _, query := range []string{
		"", "kind=token+bucket&rate=10&period=1&period_unit=minute&capacity=1,000.5&shards=4", "kind=concurrency&most=5&lease=90&lease_unit=second",
		"kind=calendar+window&rate=1e3&resets=week&first_weekday=Monday&zone=Europe/Berlin", "kind=fixed+window&rate=1&period=0.000001&start=2026-01-01T00:00:00Z",
		"kind=sliding+window&rate=2.5&period=7&period_unit=day&slices=-3", "rate=1,5&period=1e300", "rate=1&period=1&adaptive=charged&floor=0.5&growth=1e-3&epoch=2&epoch_unit=second",
		"rate=1&period=3.3333333333&period_unit=week&first_month=May&first_day=31", "%zz", "rate=NaN", "rate=Inf&period=1", "rate=1e999",
	} {
		f.Add(query)
	}
	f.Fuzz(func(t *testing.T, query string) {
		values, _ := url.ParseQuery(query)
		policy, err := form(values).policy()
		if err != nil {
			require.True(t, errors.Is(err, errForm) || errors.Is(err, ratelimit.ErrInvalidLimit), err)
			return
		}
		written := form{}
		written.fill(rules.Rule{Policy: policy})
		again, err := written.policy()
		require.NoError(t, err, "%v", written)
		require.Equal(t, policy.String(), again.String(), "%v", written)
	})
}
