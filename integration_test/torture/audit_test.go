//go:build unix

package torture_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAHistoryIsReadAsItWasWritten(t *testing.T) {
	t.Parallel()
	directory := t.TempDir()
	whole := entry{
		begin: 10, end: 20, call: "main.1.2", verb: "take", path: "batched", outcome: allowed, times: 1,
		items: []item{{"still", "ada", 2, 11, 12}, {"flow", "ada", 0.5, 13, 14}}, id: "a b", note: "x",
	}
	cut := entry{begin: 30, call: "main.1.3", verb: "take", path: "alone", outcome: begun, times: 1, items: []item{{"still", "ada", 1, 0, 0}}}
	again := whole
	again.outcome, again.items = begun, nil
	lines := again.line() + whole.line() + cut.line() + cut.line()[:20] // killed in the middle of a line
	require.NoError(t, os.WriteFile(filepath.Join(directory, strings.Replace(historyFiles, "*", "main", 1)), []byte(lines), 0o600))
	var read []entry
	require.NoError(t, readHistories(directory, func(e entry) { read = append(read, e) }))
	require.Equal(t, []entry{whole, cut}, read)
}

// An account that is wrong by one token, or by one slot, is found.
func TestWhatIsWrongIsFound(t *testing.T) {
	t.Parallel()
	c := newCatalog(time.Now(), time.Second, false)
	took := func(name string, o outcome, tokens float64, lo, hi int64) entry {
		return entry{call: "1", verb: "take", outcome: o, times: 1, items: []item{{name, "ada", tokens, lo, hi}}}
	}
	held := func(slots float64, lo, hi int64) entry {
		e := took("slots", allowed, slots, lo, hi)
		e.verb = "held"
		return e
	}
	spans := func(a *audit) error { return a.checkSpans(t.Context()) }
	slots := func(a *audit) error { return a.checkSlots(t.Context()) }
	six := func(a *audit) error { // the row says that 6 are taken
		a.taken = map[place]float64{{"still", "ada"}: 6}
		a.compareRows()
		return nil
	}
	second := time.Second.Microseconds()
	for name, of := range map[string]struct {
		entries []entry
		check   func(*audit) error
		finds   string
	}{
		"InTheSpan":         {[]entry{took("flow", allowed, 10, 1, 1), took("flow", allowed, 6, second/2, second/2), took("flow", allowed, 6, second, second)}, spans, ""},
		"OverTheSpan":       {[]entry{took("flow", allowed, 10, 1, 1), took("flow", allowed, 6, second/2, second/2), took("flow", allowed, 7, second, second)}, spans, "spans: of flow/ada"},
		"InTheWindow":       {[]entry{took("sliding", allowed, 12, 1, 1), took("sliding", allowed, 12, 1+second, 1+second)}, spans, ""},
		"OverTheWindow":     {[]entry{took("sliding", allowed, 12, 1, 1), took("sliding", allowed, 1, second, second)}, spans, "spans: of sliding/ada"},
		"Unknown":           {[]entry{took("still", allowed, 5, 1, 1), took("still", unknown, 1, 1, forever)}, six, ""},
		"CutOff":            {[]entry{took("still", allowed, 5, 1, 1), took("still", begun, 1, 0, 0)}, six, ""},
		"TakenByNobodyElse": {[]entry{took("still", allowed, 5, 1, 1)}, six, "rows: of still/ada 6 are taken"},
		"NotTaken":          {[]entry{took("still", allowed, 7, 1, 1), took("still", unknown, 1, 1, forever)}, six, "rows: of still/ada 6 are taken"},
		"Slots":             {[]entry{held(2, 1, 5), held(2, 2, 5), held(1, 5, 6)}, slots, ""},
		"OneSlotTooMany":    {[]entry{held(2, 1, 5), held(2, 2, 5), held(1, 4, 6)}, slots, "slots: of slots/ada 5 are held at 4"},
	} {
		a := &audit{catalog: c, ledger: newLedger()}
		for _, e := range of.entries {
			a.ledger.add(e)
		}
		require.NoError(t, of.check(a), name)
		if of.finds == "" {
			require.Empty(t, a.wrong, name)
			continue
		}
		require.Len(t, a.wrong, 1, name)
		require.True(t, strings.HasPrefix(a.wrong[0], of.finds), "%s: %s", name, a.wrong[0])
	}
}
