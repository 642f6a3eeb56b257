package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
)

// budget is the highest value that each number may have.
type budget map[string]float64

// readBudget reads lines of a name and a value. It returns nil if the file does not exist.
func readBudget(name string) (budget, error) {
	text, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // no budget is not an error: -update makes the first one
	}
	if err != nil {
		return nil, err
	}
	b := budget{}
	for i, line := range strings.Split(string(text), "\n") {
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(line, "#") {
			continue
		}
		if len(fields) != 2 {
			return nil, fmt.Errorf("%s:%d: want a name and a value", name, i+1)
		}
		value, err := strconv.ParseFloat(fields[1], 64)
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", name, i+1, err)
		}
		if _, twice := b[fields[0]]; twice {
			return nil, fmt.Errorf("%s:%d: %s is listed twice", name, i+1, fields[0])
		}
		b[fields[0]] = value
	}
	return b, nil
}

const budgetHeader = `# The highest value of each number that make shape prints. make lint fails when a number rises above its value.
# make shape UPDATE=1 lowers values to the numbers of the checkout. To raise one, edit this file, and give the reason in the commit.
`

func (b budget) String() string {
	lines := make([]string, 0, len(b))
	for name, value := range b {
		lines = append(lines, name+" "+format(value)+"\n")
	}
	slices.Sort(lines)
	return budgetHeader + strings.Join(lines, "")
}

// format returns a value as the budget file has it.
func format(value float64) string { return strconv.FormatFloat(value, 'f', -1, 64) }

// risen returns the numbers above their budget, in the order of their names. A number without a budget may only be 0.
func (b budget) risen(n numbers) (above []*number) {
	for _, of := range n.sorted() {
		if of.value > b[of.name] {
			above = append(above, of)
		}
	}
	return above
}

// lowered returns a budget with the values of n. It keeps the old values of walks if walked is false. It returns an error if a number
// rose, unless b is nil.
func (b budget) lowered(n numbers, walked bool) (budget, error) {
	if above := b.risen(n); b != nil && len(above) > 0 {
		text := "not updated, because these numbers rose; make them smaller, or raise them in the file by hand:\n"
		for _, of := range above {
			text += fmt.Sprintf("%s %s\n", of.name, format(of.value))
		}
		return nil, errors.New(strings.TrimSpace(text))
	}
	updated := budget{}
	for name, of := range n {
		updated[name] = of.value
	}
	for name, value := range b {
		if !walked && strings.HasPrefix(name, walkPrefix) {
			updated[name] = value
		}
	}
	return updated, nil
}
