package testkit

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"
)

// There are three tiers: short (go test -short, which make test uses), full (without -short, make test-all) and nightly
// (full, with this variable set, make nightly).
const nightlyVariable = "RATELIMIT_NIGHTLY"

//nolint:gochecknoglobals // a flag of go test
var seedFlag = flag.Uint64("seed", 0, "run each random test with this seed only; 0 chooses seeds by the size of the "+
	"test")

// Long skips t in the short tier. why is the reason: the test takes longer than a second, or needs more than a database
// and this process.
func Long(t testing.TB, why string) {
	t.Helper()
	if testing.Short() {
		t.Skip("long: " + why)
	}
}

// Nightly skips t except in the nightly tier. why is the reason.
func Nightly(t testing.TB, why string) {
	t.Helper()
	if !isNightly() {
		t.Skip("nightly: " + why)
	}
}

// Sized returns short in the short tier and full in the others.
func Sized[T any](short, full T) T {
	if testing.Short() {
		return short
	}
	return full
}

// EachSeed runs test as a parallel subtest for each seed. The seeds are 1 (short), 1, 2 and the day (full), or 1, 2
// and thirty new ones (nightly). So a short run that passes today passes tomorrow. The day is a number, for example
// 20261123. A failure prints the flags that repeat it.
func EachSeed(t *testing.T, test func(t *testing.T, seed uint64)) {
	t.Helper()
	for _, seed := range seeds(time.Now(), rand.Uint64) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			showSeed(t, seed)
			test(t, seed)
		})
	}
}

// Seed returns the seed of a test that needs only one: the flag -seed, or 1 (short), the day (full) or a new one
// (nightly). A failure prints it.
func Seed(t testing.TB) uint64 {
	t.Helper()
	seed := one(time.Now(), rand.Uint64)
	showSeed(t, seed)
	return seed
}

// showSeed prints the flags that repeat t, if it fails.
func showSeed(t testing.TB, seed uint64) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("to repeat this, run the whole test with -seed=%d -short=%v", seed, testing.Short())
		}
	})
}

// Rand returns a source of random numbers that is seeded by Seed. It is not safe for concurrent use.
func Rand(t testing.TB) *rand.Rand {
	t.Helper()
	return rand.New(rand.NewPCG(Seed(t), 0))
}

func one(now time.Time, fresh func() uint64) uint64 {
	switch {
	case *seedFlag != 0:
		return *seedFlag
	case testing.Short():
		return 1
	case isNightly():
		return fresh()
	}
	return day(now)
}

func seeds(now time.Time, fresh func() uint64) []uint64 {
	switch {
	case *seedFlag != 0:
		return []uint64{*seedFlag}
	case testing.Short():
		return []uint64{1}
	case !isNightly():
		return []uint64{1, 2, day(now)}
	}
	list := []uint64{1, 2}
	for range 30 {
		list = append(list, fresh())
	}
	return list
}

// day returns the date of now as a number of eight digits.
func day(now time.Time) uint64 {
	n, _ := strconv.ParseUint(now.UTC().Format("20060102"), 10, 64) // eight digits
	return n
}

func isNightly() bool { return !testing.Short() && os.Getenv(nightlyVariable) != "" }
