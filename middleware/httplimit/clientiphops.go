package httplimit

import (
	"iter"
	"slices"
	"strings"
)

// elementsBackward yields the elements of the list that lines are, the last first, without the white space around them.
// It reads from right to left, because the proxies have written the right end of the list.
func elementsBackward(lines []string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, line := range slices.Backward(lines) {
			for more := true; more; {
				comma := strings.LastIndexByte(line, ',')
				if !yield(strings.Trim(line[comma+1:], " \t")) {
					return
				}
				line, more = line[:max(comma, 0)], comma >= 0
			}
		}
	}
}
