package recorded_test

import (
	"slices"
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

// check checks that calls of each verb were made for each kind of limit, with each outcome and at each level, except
// impossible ones.
func (c cells) check(t *testing.T) {
	t.Helper()
	met := make(map[string]bool)
	for one := range c {
		verb := verbs()[one.verb].name
		for _, of := range []string{kindNames()[one.kind], outcomeNames()[one.outcome], levelNames()[one.level]} {
			met[verb+" "+of] = true
		}
	}
	for _, v := range verbs() {
		is := func(names ...string) bool { return slices.Contains(names, v.name) }
		require.True(t, met[v.name+" "+outcomeNames()[allowed]], "no %s is allowed", v.name)
		if is("Take", "TakeUpTo", "Check", "Require", "Wait", "Reserve", "CheckReserve", "Acquire", "Hold", "Start", "Started", "Renew") {
			require.True(t, met[v.name+" "+outcomeNames()[refused]], "no %s is refused", v.name)
		}
		require.True(t, met[v.name+" "+outcomeNames()[failed]] || is("Resolve"), "no %s fails", v.name)
		for level, name := range levelNames() {
			require.True(t, met[v.name+" "+name] || is("InTx") && level != noTransaction, "no %s at the level %q", v.name, name)
		}
		namesNone, namesOne := is("InTx", "Close", "Expire"), is("Value", "Resolve", "StoredKey")
		ofReservation := is("Start", "Started", "Renew", "Settle", "Cancel")
		for kind, name := range kindNames() {
			never := namesNone && kind != kindNone || namesOne && kind == kindNone || kind == kindBorrow && !is("Take") ||
				ofReservation && (kind == kindSlots || kind == kindSliding) // which needs a rule that makes another kind of it
			if owner, owned := ownerOf(v.name); owned {
				never = never || kind != kindNone && !slices.Contains(owner.kindsOf(), kind)
			}
			require.True(t, met[v.name+" "+name] || never, "no %s of the kind %q", v.name, name)
		}
	}
}
