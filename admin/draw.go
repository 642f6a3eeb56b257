package admin

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A chartSpan is the time that a chart of refusals shows, in Bars of some minutes each. The last bar has the present.
type chartSpan struct {
	// Name is for addresses, and Words are for people.
	Name, Words string
	Bars        int
	Bar         time.Duration
}

// spans returns what charts can show. The tables have all that was refused, unless its counts were pruned.
func spans() []chartSpan {
	return []chartSpan{
		{"15min", "15 min", 16, time.Minute},
		{"1h", "1 h", 61, time.Minute},
		{"24h", "24 h", 60, 24 * time.Minute},
		{"7d", "7 d", 56, 3 * time.Hour},
	}
}

// spanOf returns the span of a name, by default the hour.
func spanOf(name string) chartSpan {
	for _, s := range spans() {
		if s.Name == name {
			return s
		}
	}
	return spans()[1]
}

// length returns how long the span is.
func (s chartSpan) length() time.Duration { return time.Duration(s.Bars) * s.Bar }

// around returns from when to when the chart is.
func (s chartSpan) around(now time.Time) (since, until time.Time) {
	until = now.Truncate(time.Minute).Add(time.Minute)
	return until.Add(-s.length()), until
}

// refusalBars are the bars of a chart: the refusals above the allowed requests. Its minutes have no gaps.
type refusalBars struct {
	// Bars are in the order of the minutes.
	Bars []bar
	// Refused is the number of refusals, and Cost the sum of their costs in tokens. Highest is the most refusals of one
	// bar.
	Refused, Highest int64
	// Allowed is the number of allowed requests. Top is the upper end of the axis: a round number.
	Allowed, Top int64
	Cost         float64
	// Since is the start of the first minute. Late reports whether it is later than the requested start, because there are
	// too many rows.
	Since time.Time
	Late  bool
	// Span is the time that is shown.
	Span chartSpan
}

// bar is a minute or more of a chart that is as wide as it has bars, and 100 high.
type bar struct {
	Begin            time.Time
	Refused, Allowed int64
	X                int
	Y, Height        float64 // of the refusals
	AllowedHeight    float64 // from the ground up to the refusals
}

// Half is the middle of the axis, and Grid where its lines are.
func (r refusalBars) Half() float64 { return float64(r.Top) / 2 }
func (refusalBars) Grid() []int     { return []int{0, 50, 100} }

// roundUp returns the next number of one digit and zeros.
func roundUp(n int64) int64 {
	digit := int64(1)
	for n > 10*digit {
		digit *= 10
	}
	return (n + digit - 1) / digit * digit
}

// AllowedY is where the allowed requests begin, under the refusals.
func (b bar) AllowedY() float64 { return 100 - b.AllowedHeight }

// lastHour returns from when to when the last hour is.
func lastHour(now time.Time) (since, until time.Time) { return spanOf("1h").around(now) }

// barsOf returns the bars of minutes. A minute without a request has an empty bar.
func (s chartSpan) barsOf(minutes []inspect.Minute, since, seen time.Time) refusalBars {
	r := refusalBars{Since: seen, Late: seen.After(since), Span: s, Bars: make([]bar, s.Bars)}
	for i := range r.Bars {
		r.Bars[i] = bar{Begin: since.Add(time.Duration(i) * s.Bar), X: i}
	}
	var highest int64 // refused and allowed requests of one bar
	for _, m := range minutes {
		r.Refused, r.Allowed, r.Cost = r.Refused+m.Refused, r.Allowed+m.Allowed, r.Cost+m.Cost
		if i := int(m.Begin.Sub(since) / s.Bar); i >= 0 && i < len(r.Bars) {
			r.Bars[i].Refused += m.Refused
			r.Bars[i].Allowed += m.Allowed
			r.Highest = max(r.Highest, r.Bars[i].Refused)
			highest = max(highest, r.Bars[i].Refused+r.Bars[i].Allowed)
		}
	}
	r.Top = roundUp(highest)
	height := func(n int64) float64 {
		if n == 0 {
			return 0
		}
		return math.Max(math.Round(float64(n)/float64(r.Top)*1000)/10, 3) // one request is seen, too
	}
	for i := range r.Bars {
		b := &r.Bars[i]
		b.Height = height(b.Refused)
		b.AllowedHeight = math.Min(height(b.Allowed), 100-b.Height)
		b.Y = round2(100 - b.AllowedHeight - b.Height)
	}
	return r
}

// The chart of a level, in units of its drawing.
const (
	chartWidth, chartHeight = 720, 200
	chartSteps              = 180
	shortest                = 10 * time.Second
	longest                 = 30 * ratelimit.Day
)

// curve is the level of a bucket over time: since its last change, and from now on without further calls.
type curve struct {
	// Past and Future are SVG paths that meet at Now, in a drawing of 720 by 200, and Area is the area below them.
	Past, Future, Area string
	// Now, Zero and Full are where the present, nothing and the capacity are.
	Now, Zero, Full float64
	// From, At and To are the instants at the left end, at Now and at the right end.
	From, At, To time.Time
	// Capacity is the most the bucket holds.
	Capacity float64
}

// curveOf draws what a bucket holds around the instant of the reading. It was changed last at an instant, before which
// nothing is known.
func curveOf(v ratelimit.Value, changed time.Time) curve {
	full, err := v.RetryAfter(v.AsOf, math.Max(v.Limit.Capacity(), 0))
	if err != nil {
		full = 0
	}
	half := min(max(full*5/4, shortest), longest)
	c := curve{From: v.AsOf.Add(-half / 2), At: v.AsOf, To: v.AsOf.Add(half), Capacity: math.Max(v.Limit.Capacity(), 0)}
	whole := c.To.Sub(c.From)
	lowest := math.Min(0, v.At(changed))
	lowest = math.Min(lowest, v.Tokens)
	y := func(tokens float64) float64 {
		high := math.Max(c.Capacity, 1e-9)
		return round2(10 + (chartHeight-20)*(high-tokens)/(high-lowest))
	}
	x := func(at time.Time) float64 { return round2(chartWidth * float64(at.Sub(c.From)) / float64(whole)) }
	path := func(from, to time.Time) string {
		var points []string
		for i := range chartSteps + 1 {
			at := from.Add(time.Duration(float64(to.Sub(from)) * float64(i) / chartSteps))
			points = append(points, decimal(x(at))+" "+decimal(y(v.At(at))))
		}
		return "M" + strings.Join(slices.Compact(points), "L")
	}
	if changed.Before(c.From) {
		changed = c.From
	}
	if changed.Before(c.At) {
		c.Past = path(changed, c.At)
	}
	c.Future = path(c.At, c.To)
	c.Now, c.Zero, c.Full = x(c.At), y(0), y(c.Capacity)
	c.Area = "M" + decimal(x(changed)) + " " + decimal(c.Zero) + strings.ReplaceAll(c.Past+c.Future, "M", "L") +
		"L" + decimal(chartWidth) + " " + decimal(c.Zero) + "Z"
	return c
}

func round2(x float64) float64 { return math.Round(x*100) / 100 }

func decimal(x float64) string { return strconv.FormatFloat(x, 'f', -1, 64) }
