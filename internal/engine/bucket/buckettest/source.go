// Package buckettest checks the algebra of package bucket, for tests of several packages. It draws random policies and
// histories, and has an exact model of their results.
package buckettest

import "math/rand/v2"

// Source is where draws come from: a generator with a seed, or rapid, which shrinks them.
type Source interface {
	Pick(n int) int // from 0 up to n-1
	Unit() float64  // from 0 up to 1
}

// Seeded is a Source that draws the same again from the same seed.
type Seeded struct{ *rand.Rand }

// Pick returns a number from 0 up to n-1.
func (s Seeded) Pick(n int) int { return s.IntN(n) }

// Unit returns a number from 0 up to 1.
func (s Seeded) Unit() float64 { return s.Float64() }

// One returns one of the values.
func One[T any](src Source, of ...T) T { return of[src.Pick(len(of))] }
