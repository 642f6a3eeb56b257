package scenario

import (
	"fmt"
	"math"
	"time"

	"golang.org/x/text/language"
	"golang.org/x/text/message"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
)

// Figure names a figure of a round.
type Figure string

// The figures, with their names in the output.
const (
	Throughput  Figure = "throughput"
	P50         Figure = "p50"
	P99         Figure = "p99"
	Trips       Figure = "roundTrips"
	Attempts    Figure = "attempts"
	WAL         Figure = "walBytes"
	Allocations Figure = "allocations"
	Processor   Figure = "processor"
)

// Figures returns all figures.
func Figures() []Figure {
	return []Figure{Throughput, P50, P99, Trips, Attempts, WAL, Allocations, Processor}
}

// series returns the figure's value in each round.
func (f Figure) series(rounds []contender.Round) []float64 {
	values := make([]float64, len(rounds))
	for i, r := range rounds {
		values[i] = map[Figure]float64{
			Throughput: r.Throughput, P50: r.P50, P99: r.P99, Trips: r.Trips, Attempts: r.Attempts,
			WAL: r.WAL, Allocations: r.Allocations, Processor: r.Processor,
		}[f]
	}
	return values
}

// Format returns a value of the figure with its unit, or "-" if it was not measured.
func (f Figure) Format(value float64) string {
	switch {
	case math.IsNaN(value):
		return "-"
	case f == Throughput:
		return FormatCount(value)
	case f == P50 || f == P99 || f == Processor:
		return FormatSeconds(value)
	case f == Trips:
		return fmt.Sprintf("%.3f", value)
	case f == Attempts || f == WAL:
		return fmt.Sprintf("%.2f", value)
	}
	return fmt.Sprintf("%.1f", value)
}

// FormatCount returns a whole number with separators.
func FormatCount(value float64) string {
	return message.NewPrinter(language.English).Sprintf("%.0f", value)
}

// FormatSeconds returns seconds with three significant digits, in a fitting unit.
func FormatSeconds(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	digit := time.Duration(1)
	for d/digit >= 1000 {
		digit *= 10
	}
	return d.Round(digit).String()
}

// FormatRatio returns a small ratio with two significant digits, and others with two decimals.
func FormatRatio(ratio float64) string {
	if ratio < 0.1 {
		return fmt.Sprintf("%.2g", ratio)
	}
	return fmt.Sprintf("%.2f", ratio)
}
