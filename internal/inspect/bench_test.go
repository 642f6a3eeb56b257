package inspect_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// BenchmarkMillion measures each query at 1,000,000 buckets of 100 limits, 1,000,000 reservations, and an hour in which
// 10,000 keys were refused each minute, none of them twice:
//
//	go test -run '^$' -bench Million -benchtime 21x ./internal/inspect
func BenchmarkMillion(b *testing.B) {
	f := setup(b)
	f.seed(b, 1_000_000, 10_000)
	for _, query := range queries() {
		b.Run(query.name, func(b *testing.B) {
			var took []time.Duration
			for b.Loop() {
				began := time.Now()
				require.NoError(b, query.run(b.Context(), f.Reader))
				took = append(took, time.Since(began))
			}
			slices.Sort(took)
			b.ReportMetric(took[len(took)/2].Seconds()*1000, "ms/median")
			b.ReportMetric(took[len(took)-1].Seconds()*1000, "ms/longest")
		})
	}
}
