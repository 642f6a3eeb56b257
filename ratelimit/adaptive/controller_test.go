package adaptive

import (
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// exactShare is what adapting.next promises, in fractions. It is nil if the answer may be one of two, because a float
// is on the edge between them.
func exactShare(a adapting, share float64, m measured) (next *big.Rat, cut, onEdge bool) {
	rat := func(f float64) *big.Rat { return new(big.Rat).SetFloat64(f) }
	times := func(a, b *big.Rat) *big.Rat { return new(big.Rat).Mul(a, b) }
	least := func(a, b *big.Rat) *big.Rat {
		if a.Cmp(b) < 0 {
			return a
		}
		return b
	}
	most := func(a, b *big.Rat) *big.Rat {
		if a.Cmp(b) > 0 {
			return a
		}
		return b
	}
	clamp := func(s *big.Rat) *big.Rat { return least(most(s, rat(a.floor)), big.NewRat(1, 1)) }
	exceeds := func(left, right *big.Rat) bool {
		distance := new(big.Rat).Sub(left, right)
		onEdge = onEdge || distance.Abs(distance).Cmp(times(right, big.NewRat(1, 1e9))) <= 0 && right.Sign() > 0
		return left.Cmp(right) > 0
	}
	now := clamp(rat(share))
	if m.Outcomes == 0 || m.span <= 0 || m.span > 11*a.epoch {
		return now, false, false
	}
	seconds := big.NewRat(int64(m.span), int64(time.Second))
	allowed := times(times(now, rat(a.rate)), seconds)
	accepted, sent := rat(m.Accepted), new(big.Rat).Add(rat(m.Accepted), rat(m.Throttled))
	if !a.applied {
		sent = least(sent, allowed)
		accepted = least(accepted, sent)
	}
	throttled := new(big.Rat).Sub(sent, accepted)
	isThrottled := exceeds(times(throttled, big.NewRat(100, 1)), sent)
	isLow := exceeds(times(allowed, big.NewRat(7, 10)), sent)
	if !isThrottled {
		if isLow {
			return now, false, onEdge
		}
		return clamp(new(big.Rat).Add(now, times(rat(a.growth), seconds))), false, onEdge
	}
	if m.Outcomes < 10 {
		return now, false, onEdge
	}
	left := most(times(allowed, big.NewRat(7, 10)), times(accepted, big.NewRat(85, 100)))
	if !isLow && !exceeds(sent, times(throttled, big.NewRat(2, 1))) {
		left = times(least(allowed, accepted), big.NewRat(7, 10))
	}
	left = least(left, times(allowed, big.NewRat(85, 100)))
	return clamp(left.Quo(left, times(rat(a.rate), seconds))), true, onEdge
}

// Random epochs, one after the other: each answer agrees with the exact model, within the bounds, and the share never
// grows without demand.
func TestAdaptingIsExact(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		steps := testkit.Sized(2_500, 5_000)
		random := rand.New(rand.NewPCG(seed, 7))
		pick := func(of ...float64) float64 { return of[random.IntN(len(of))] }
		var grown, cuts, held int
		share := 1.0
		var a adapting
		for step := range steps {
			if step%50 == 0 { // another policy takes over the stored state
				a = adapting{
					rate: pick(0.01, 1, 100, 1e6), floor: pick(0.001, 0.1, 0.5, 1), growth: pick(0.001, 0.04, 1),
					epoch: time.Duration(pick(0.1, 2, 3600) * float64(time.Second)), applied: random.IntN(3) > 0,
				}
			}
			m := measured{tally: tally{Outcomes: random.Int64N(40)}, span: time.Duration(random.Float64() * pick(1, 1, 1, 20) * float64(a.epoch))}
			if random.IntN(50) == 0 {
				m.span = -m.span
			}
			sent := share * a.rate * max(m.span, 0).Seconds() * pick(0, 0.3, 0.69, 0.71, 1, 1.5, 10)
			m.Throttled = sent * pick(0, 0, 0, 0.005, 0.02, 0.3, 0.6, 1)
			m.Accepted = sent - m.Throttled
			want, wantCut, onEdge := exactShare(a, share, m)
			next, cut := a.next(share, m)
			require.GreaterOrEqual(t, next, a.floor)
			require.LessOrEqual(t, next, 1.0)
			if !onEdge {
				exact, _ := want.Float64()
				require.InEpsilon(t, exact, next, 1e-9, "step %d: %+v at %v: %+v", step, a, share, m)
				require.Equal(t, wantCut, cut)
			}
			before := a.clamp(share)
			switch {
			case cut:
				cuts++
				require.LessOrEqual(t, next, max(0.85*before*(1+1e-9), a.floor))
			case next > before:
				grown++
				require.LessOrEqual(t, next, before+a.growth*m.span.Seconds()+1e-12)
				require.GreaterOrEqual(t, m.Accepted+m.Throttled, 0.7*before*a.rate*m.span.Seconds()*(1-1e-9), "nobody wanted more")
			default:
				held++
				require.Equal(t, before, next)
			}
			share = next
		}
		require.Greater(t, min(grown, cuts, held), steps/100)
	})
}

func TestAdaptingRejectsAShareOfNone(t *testing.T) {
	t.Parallel()
	a := adapting{rate: 100, floor: 0.1, growth: 0.04, epoch: 2 * time.Second}
	zero := 0.0
	for _, share := range []float64{-1, 0, 0.01, zero / zero} {
		next, _ := a.next(share, measured{})
		require.Equal(t, 0.1, next)
	}
	next, _ := a.next(7, measured{})
	require.Equal(t, 1.0, next)
}

func TestEpochIsOver(t *testing.T) {
	t.Parallel()
	a := adapting{rate: 100, floor: 0.1, growth: 0.04, epoch: 2 * time.Second, applied: true}
	inShadow := a
	inShadow.applied = false
	well, sudden := measured{tally: tally{Outcomes: 10, Accepted: 10}}, measured{tally: tally{Outcomes: 10, Accepted: 7, Throttled: 3}}
	few := measured{tally: tally{Outcomes: 9, Throttled: 9}}
	for _, c := range []struct {
		what     string
		of       adapting
		m        measured
		span     time.Duration
		afterCut bool
		over     bool
	}{
		{"not yet", a, well, 2*time.Second - 1, false, false},
		{"after its time", a, well, 2 * time.Second, false, true},
		{"few outcomes go on", a, few, 20*time.Second - 1, false, false},
		{"and not for ever", a, few, 20 * time.Second, false, true},
		{"suddenly throttled", a, sudden, 500 * time.Millisecond, false, true},
		{"suddenly, but too soon", a, sudden, 500*time.Millisecond - 1, false, false},
		{"cut in the epoch before", a, sudden, 500 * time.Millisecond, true, false},
		{"in shadow nothing follows", inShadow, sudden, 500 * time.Millisecond, false, false},
	} {
		c.m.span = c.span
		require.Equal(t, c.over, c.of.isOver(c.m, c.afterCut), c.what)
	}
}
