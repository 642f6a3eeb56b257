package recorded_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// cells counts calls, by verb, kind, outcome and level.
type cells map[call]int

func (c cells) add(called []call) {
	for _, one := range called {
		c[one]++
	}
}

func (c call) String() string {
	return fmt.Sprintf("%s of %s: %s, %s", verbs()[c.verb].name, kindNames()[c.kind], outcomeNames()[c.outcome], levelNames()[c.level])
}

// How often a cell is met.
const (
	always      = iota // in all histories together
	never              // it cannot be
	exceptional        // where a rule has made another kind of the limit, or of a bucket under two policies: it may be, and need not
)

// expected returns whether calls of a cell are met, and where not, why.
func expected(c call) (met int, why string) {
	verb := verbs()[c.verb].name
	is := func(names ...string) bool { return slices.Contains(names, verb) }
	byID := is("Start", "Started", "Renew", "Settle", "Cancel", "RenewLease", "Release", "Keep")
	named := c.kind != kindNone
	switch {
	case is("InTx", "Close", "Expire") && named:
		return never, "it names no limit"
	case !named && is("Value", "Resolve", "StoredKey", "Report"):
		return never, "it takes one request"
	case is("InTx") && c.level != noTransaction:
		return never, "no transaction begins in a transaction"
	case is("Wait", "Hold", "Keep", "Prune", "Close") && c.level != noTransaction && c.outcome != failed:
		return never, "it is an error in a transaction"
	case c.outcome == refused && !is("Take", "TakeUpTo", "Check", "Require", "Wait", "Reserve", "CheckReserve", "Acquire", "Hold", "Start", "Started", "Renew"):
		return never, "it decides nothing"
	case is("Resolve") && c.outcome == failed:
		return never, "it returns no error"
	case c.kind == kindBorrow && is("Report", "StoredKey"), is("Keep") && !named && c.outcome == allowed:
		return exceptional, "what the call does not look at may be anything"
	case !named && c.outcome != failed && !is("InTx", "Close", "Expire", "Prune"):
		return never, "a call for nothing is an error"
	case c.kind == kindBorrow && (byID || is("Prune")):
		return never, "what borrows is not reserved, held or pruned"
	case c.kind == kindBorrow && c.outcome != failed && !is("Take", "TakeUpTo", "Check", "Require", "Resolve", "StoredKey"):
		return never, "what borrows is taken, and that alone"
	}
	otherwise := c.kind == kindSlots || c.kind == kindSliding
	reserves := is("Reserve", "CheckReserve", "Wait") && c.outcome != failed || is("Start", "Started", "Renew", "Settle", "Cancel")
	if otherwise && reserves || c.kind == kindSlots && is("Take", "TakeUpTo", "Require", "Credit", "CreditTaken", "Charge") && c.outcome != failed {
		return exceptional, "a rule has made another kind of it"
	}
	if is("Report") && c.kind != kindAdaptive && c.outcome == allowed {
		return exceptional, "a rule has made another kind of it"
	}
	return always, ""
}

// list returns the names of cells, a line each.
func list(of []call) string {
	lines := make([]string, len(of))
	for i, c := range of {
		lines[i] = c.String()
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// wrong returns the required cells that are missing, and the impossible cells that were met.
func (c cells) wrong() (missing, impossible []call) {
	for verb := range verbs() {
		for kind := range kinds {
			for outcome := range outcomes {
				for level := range levels {
					one := call{verb, kind, outcome, level}
					switch met, _ := expected(one); {
					case met == always && c[one] == 0:
						missing = append(missing, one)
					case met == never && c[one] != 0:
						impossible = append(impossible, one)
					}
				}
			}
		}
	}
	return missing, impossible
}

// check checks that each required cell is met, and no impossible one. If only some histories ran, it requires each verb with each
// of its outcomes, kinds and levels by itself.
func (c cells) check(t *testing.T, all bool) {
	t.Helper()
	missing, impossible := c.wrong()
	require.Empty(t, list(impossible), "cells that were thought to be impossible")
	if all {
		require.Empty(t, list(missing), "cells that no history meets")
		return
	}
	met := make(map[call]bool)
	parts := func(of call) [3]call {
		const all = -1
		return [3]call{{of.verb, of.kind, all, all}, {of.verb, all, of.outcome, all}, {of.verb, all, all, of.level}}
	}
	for one := range c {
		for _, part := range parts(one) {
			met[part] = true
		}
	}
	for _, one := range missing {
		for _, part := range parts(one) {
			require.True(t, met[part], "%v: no history has this verb with such a kind, outcome or level", one)
		}
	}
}
