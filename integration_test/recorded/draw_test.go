package recorded_test

import "time"

// draw is a source of random numbers that is the same in every version of Go (splitmix64): the vectors depend on each
// number.
type draw struct{ state uint64 }

// newDraw returns a source for a history, or for a part of one.
func newDraw(numbers ...uint64) *draw {
	d := &draw{}
	for _, n := range numbers {
		d.state = d.next() ^ n
	}
	return d
}

func (d *draw) next() uint64 {
	d.state += 0x9e3779b97f4a7c15
	z := d.state
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// below returns a number from 0 up to, and not including, n.
func (d *draw) below(n int) int { return int(d.next() % uint64(n)) }

// oneIn is true once in n times.
func (d *draw) oneIn(n int) bool { return d.below(n) == 0 }

// span returns a duration below most, in whole microseconds.
func (d *draw) span(most time.Duration) time.Duration {
	return time.Duration(d.next()%uint64(most/time.Microsecond)) * time.Microsecond
}

// oneOf returns one of the values.
func oneOf[T any](d *draw, values ...T) T { return values[d.below(len(values))] }
