package browsertest

import (
	"bytes"
	"compress/gzip"
	"context"
	_ "embed"
	"io"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
)

// compressed is axe-core 4.14.1 as its authors publish it, in gzip, under the Mozilla Public License 2.0; see
// axe/LICENSE.
//
//go:embed axe/axe.min.js.gz
var compressed []byte

// axeTimeout is how long a busy machine may take to look at a page.
const axeTimeout = 2 * time.Minute

// Violation is a rule of accessibility that a page breaks.
type Violation struct {
	ID      string   `json:"id"`      // the rule's name, as "color-contrast"
	Impact  string   `json:"impact"`  // "serious" or "critical"
	Help    string   `json:"help"`    // what the rule asks for
	Targets []string `json:"targets"` // the HTML of the elements that break it, and why
}

// Axe checks the current page of the tab with axe-core, and returns the violations of serious and critical impact. A
// Content-Security-Policy of the page does not hinder it. The page keeps the global axe.
func Axe(t testing.TB, tab context.Context) []Violation {
	t.Helper()
	reader, err := gzip.NewReader(bytes.NewReader(compressed))
	if err != nil {
		t.Fatalf("read axe-core: %v", err)
	}
	axe, err := io.ReadAll(reader)
	if err != nil {
		t.Fatalf("read axe-core: %v", err)
	}
	ctx, cancel := context.WithTimeout(tab, axeTimeout)
	defer cancel()
	if _, err := chromedp.Run(ctx, chromedp.Evaluate[bool](string(axe)+";true")); err != nil {
		t.Fatalf("load axe-core into the page: %v", err)
	}
	violations, err := chromedp.Run(ctx, chromedp.Evaluate[[]Violation](`
		axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => violations
			.filter(({ impact }) => impact === 'serious' || impact === 'critical')
			.map(({ id, impact, help, nodes }) => ({
				id, impact, help, targets: nodes.map((n) => n.html + '\n' + n.failureSummary),
			})))`, chromedp.EvalAwaitPromise))
	if err != nil {
		t.Fatalf("run axe-core: %v", err)
	}
	return violations
}
