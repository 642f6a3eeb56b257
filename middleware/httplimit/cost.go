package httplimit

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Cost returns how many tokens a request takes: [FixedCost], [StatedCost], or a [CostFunc].
//
// A negative cost, NaN, and an error that wraps [ratelimit.ErrInvalidCost] are answered 400, and other errors 503, even
// with FailOpen. A cost above the limit's capacity is answered 413, without Retry-After. A cost of 0 takes nothing, and
// is refused only while the bucket is in debt.
type Cost interface {
	Of(r *http.Request) (float64, error)
}

// FixedCost is the same cost for every request.
type FixedCost float64

// Of returns the cost.
func (c FixedCost) Of(*http.Request) (float64, error) { return float64(c), nil }

func (c FixedCost) static() []staticCost { return []staticCost{{"Cost", float64(c)}} }

func (c FixedCost) validate() error {
	if !(c >= 0) {
		return fmt.Errorf("its Cost is %v; use a number from 0 up", float64(c))
	}
	return nil
}

// staticCost is a cost that does not depend on the request.
type staticCost struct {
	field string
	cost  float64
}

// What the core can tell from nothing: a share of the capacity, and tokens.
const (
	minCostShare = 0x1p-40
	minCost      = 1e-9
)

// validate returns an error when limit could never take the cost.
func (c staticCost) validate(limit ratelimit.Limit) error {
	switch capacity := limit.Capacity(); {
	case c.cost > capacity:
		return fmt.Errorf("its %s is %v, and the limit never holds more than %v; lower the cost or raise the capacity",
			c.field, c.cost, capacity)
	case guard.IsHeld(limit) && c.cost != math.Trunc(c.cost):
		return fmt.Errorf("its %s is %v, and slots are whole", c.field, c.cost)
	case c.cost > 0 && c.cost < max(capacity*minCostShare, minCost):
		return fmt.Errorf("its %s is %v, which is too small beside the capacity of %v; use a larger unit of cost, or 0",
			c.field, c.cost, capacity)
	}
	return nil
}

// CostFunc is a cost that a function works out. It must leave the request's body for the handler.
type CostFunc func(r *http.Request) (float64, error)

// Of calls the function.
func (f CostFunc) Of(r *http.Request) (float64, error) { return f(r) }

func (f CostFunc) validate() error {
	if f == nil {
		return errors.New("its Cost is a nil CostFunc")
	}
	return nil
}

// StatedCost is a cost that the request states in a header. If clients set it, it's an estimate, so settle the real
// cost (see [Admission.Settle]); otherwise let only a proxy of yours set it.
type StatedCost struct {
	// Header is the name of the header, as "X-Tokens". Of several values the greatest counts.
	Header string
	// Min is the least that counts. Defaults to 1.
	Min float64
	// Default is the cost of a request that states none, or something that is not a number. Defaults to Min.
	Default float64
	// Max is the most that counts. Defaults to no bound: a request that states more than the limit's capacity is answered
	// 413.
	Max float64
}

func (c StatedCost) withDefaults() StatedCost {
	if c.Min == 0 {
		c.Min = 1
	}
	if c.Default == 0 {
		c.Default = c.Min
	}
	if c.Max == 0 {
		c.Max = math.MaxFloat64
	}
	return c
}

func (c StatedCost) static() []staticCost {
	c = c.withDefaults()
	return []staticCost{{"StatedCost.Min", c.Min}, {"StatedCost.Default", c.Default}}
}

func (c StatedCost) validate() error {
	d := c.withDefaults()
	switch {
	case c.Header == "":
		return errors.New("its StatedCost needs the name of a Header")
	case !(d.Min > 0 && d.Min <= d.Default && d.Default <= d.Max) || math.IsInf(d.Default, 1):
		return fmt.Errorf("its StatedCost has Min %v, Default %v and Max %v; they must be above 0 and in this order", d.Min,
			d.Default, d.Max)
	}
	return nil
}

// Of returns the cost that r states, brought into range.
func (c StatedCost) Of(r *http.Request) (float64, error) {
	c = c.withDefaults()
	stated, ok := greatest(r.Header.Values(c.Header))
	if !ok {
		return c.Default, nil
	}
	return min(max(stated, c.Min), c.Max), nil
}

// greatest returns the greatest of the values that are numbers, and whether there is one. One too large for
// a float64 counts as infinite.
func greatest(values []string) (float64, bool) {
	most, found := 0.0, false
	for _, value := range values {
		n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if math.IsNaN(n) || err != nil && !errors.Is(err, strconv.ErrRange) {
			continue
		}
		if !found || n > most {
			most, found = n, true
		}
	}
	return most, found
}
