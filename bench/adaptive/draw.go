package main

import (
	"fmt"
	"strings"
	"time"
)

// The sizes of the drawing, in units of its viewBox.
const (
	width, height       = 728, 300
	left, right         = 44, 20
	top, bottom         = 34, 40
	mostShown           = 120.0 // requests a second
	plotWidth           = width - left - right
	plotHeight          = height - top - bottom
	secondsBetweenMarks = 20
)

// draw returns the path as an SVG that is readable on light and on dark.
func draw(p path, third time.Duration) []byte {
	var b strings.Builder
	seconds := 3 * third.Seconds()
	x := func(second float64) float64 { return left + plotWidth*min(second/seconds, 1) }
	y := func(rate float64) float64 { return top + plotHeight*(1-min(rate/mostShown, 1)) }
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-labelledby="title">
<title id="title">An upstream takes %d requests a second, then %d, then %d; what an adaptive limit allows follows it.</title>
<style>
  text { font: 12px sans-serif; fill: #24292f }
  .grid { stroke: #d0d7de; fill: none } .capacity { stroke: #57606a; stroke-dasharray: 5 4; fill: none; stroke-width: 1.5 }
  .allowed { stroke: #0969da; fill: none; stroke-width: 2.5 } .throttled { fill: #cf222e }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .grid { stroke: #30363d } .capacity { stroke: #9198a1 } .allowed { stroke: #58a6ff } .throttled { fill: #ff7b72 }
  }
</style>
`, width, height, width, height, contract, fallen, contract)
	for rate := 0.0; rate <= mostShown; rate += 20 {
		fmt.Fprintf(&b, `<path class="grid" d="M%d %.1fH%d"/><text x="%d" y="%.1f" text-anchor="end">%v</text>`+"\n",
			left, y(rate), width-right, left-6, y(rate)+4, rate)
	}
	for second := 0.0; second <= seconds; second += secondsBetweenMarks {
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%v s</text>`+"\n", x(second), height-bottom+18, second)
	}
	t := third.Seconds()
	fmt.Fprintf(&b, `<path class="capacity" d="M%.1f %.1fH%.1fV%.1fH%.1fV%.1fH%.1f"/>`+"\n",
		x(0), y(contract), x(t), y(fallen), x(2*t), y(contract), x(3*t))
	fmt.Fprintf(&b, `<path class="allowed" d="M%.1f %.1f`, x(0), y(contract*first(p.share)))
	for i, share := range p.share {
		if i > 0 && share != p.share[i-1] {
			fmt.Fprintf(&b, "H%.1fV%.1f", x(float64(i)*sampleEvery.Seconds()), y(contract*share))
		}
	}
	fmt.Fprintf(&b, "H%.1f\"/>\n<path class=\"throttled\" d=\"", x(seconds))
	perSecond := int(time.Second / sampleEvery)
	for i := 0; i+perSecond <= len(p.throttled); i += perSecond {
		throttled := 0.0
		for _, rate := range p.throttled[i : i+perSecond] {
			throttled += rate / float64(perSecond)
		}
		if throttled > 0 {
			second := float64(i) * sampleEvery.Seconds()
			fmt.Fprintf(&b, "M%.1f %.1fH%.1fV%.1fH%.1fz", x(second), y(0), x(second+0.8), y(throttled), x(second))
		}
	}
	b.WriteString("\"/>\n")
	legend := []struct{ class, shape, text string }{
		{"capacity", "M0 0h22", "the upstream accepts"},
		{"allowed", "M0 0h22", "the limit allows"},
		{"throttled", "M7 5v-10h8v10z", "throttled, each in requests a second"},
	}
	for i, l := range legend {
		fmt.Fprintf(&b, `<g transform="translate(%d 16)"><path class="%s" d="%s"/><text x="28" y="4">%s</text></g>`+"\n",
			left+190*i, l.class, l.shape, l.text)
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

// first returns the first value, or 1 without values.
func first(values []float64) float64 {
	if len(values) == 0 {
		return 1
	}
	return values[0]
}
