package rules

import (
	"cmp"
	"errors"
	"math"
	"net/textproto"
	"strconv"
)

// cost is how much a tier asks for.
type cost struct {
	source string // empty: fixed
	fixed  float64
	absent float64
}

// newCost returns what a tier says of its cost.
func newCost(of *Tier) cost {
	c := cost{source: of.CostSource, fixed: cmp.Or(of.FixedCost, 1), absent: cmp.Or(of.DefaultCost, 1)}
	if c.source == "fixed" {
		c.source = ""
	}
	return c
}

// known returns the fixed cost, or the cost of a request that states none.
func (c *cost) known() float64 {
	if c.source == "" {
		return c.fixed
	}
	return c.absent
}

// of returns the cost of a request. Of several values that it states the greatest counts.
func (c *cost) of(stated func(source string) []string) float64 {
	if c.source == "" {
		return c.fixed
	}
	if stated == nil {
		return c.absent
	}
	most := 0.0
	for _, text := range stated(c.source) {
		n, err := strconv.ParseFloat(textproto.TrimString(text), 64)
		if n > most && (err == nil || errors.Is(err, strconv.ErrRange)) {
			most = n
		}
	}
	if !(most > 0) {
		return c.absent
	}
	return min(max(most, min(1, c.absent)), math.MaxFloat64)
}
