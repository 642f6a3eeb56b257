package browsertest

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// playTimeout is how long a script may take on a busy machine.
const playTimeout = 5 * time.Minute

// Watch keeps what a browser tells of a tab.
type Watch struct {
	mutex              sync.Mutex
	problems, requests []string
}

// NewWatch returns a Watch for a tab that is opened with chromedp.WithListener(w.Listen). The test fails when the tab
// had problems by its end: errors of scripts and of loading, violations of the Content-Security-Policy, and output of
// scripts to the console.
func NewWatch(t testing.TB) *Watch {
	t.Helper()
	w := &Watch{}
	t.Cleanup(func() {
		for _, problem := range w.seen(&w.problems) {
			t.Errorf("the browser tells of a problem: %s", problem)
		}
	})
	return w
}

// NewWatched starts a browser as New does, and returns a tab of it with what watches it.
func NewWatched(t testing.TB) (context.Context, *Watch) {
	t.Helper()
	w := NewWatch(t)
	tab, cancel := chromedp.NewContext(New(t), chromedp.WithListener(w.Listen))
	t.Cleanup(cancel)
	return tab, w
}

// Requests returns the addresses that the tab has asked for.
func (w *Watch) Requests() []string { return w.seen(&w.requests) }

func (w *Watch) seen(list *[]string) []string {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return slices.Clone(*list)
}

// Listen keeps what the browser tells.
func (w *Watch) Listen(event any) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		w.requests = append(w.requests, e.Request.URL)
	case *runtime.EventExceptionThrown:
		problem := e.ExceptionDetails.Text
		if thrown := e.ExceptionDetails.Exception; thrown != nil {
			problem += " " + thrown.Description
		}
		w.problems = append(w.problems, problem)
	case *runtime.EventConsoleAPICalled:
		w.problems = append(w.problems, "the page wrote to the console: "+string(e.Type))
	case *log.EventEntryAdded:
		w.problems = append(w.problems, e.Entry.Text)
	}
}

// Play runs the body of an async function in the page that the tab shows, and returns its result.
func Play[T any](t testing.TB, tab context.Context, body string) T {
	t.Helper()
	ctx, cancel := context.WithTimeout(tab, playTimeout)
	defer cancel()
	result, err := chromedp.Run(ctx, chromedp.Evaluate[T]("(async () => {"+body+"})()", chromedp.EvalAwaitPromise))
	if err != nil {
		t.Fatalf("run a script in the page: %v", err)
	}
	return result
}

// Prefer replaces the user's preferences, for example by "prefers-color-scheme" "dark".
func Prefer(t testing.TB, tab context.Context, features ...string) {
	t.Helper()
	var media []*emulation.MediaFeature
	for i := 0; i < len(features); i += 2 {
		media = append(media, &emulation.MediaFeature{Name: features[i], Value: features[i+1]})
	}
	if _, err := chromedp.Call(tab, emulation.SetEmulatedMedia,
		emulation.SetEmulatedMediaParams{Features: media}); err != nil {
		t.Fatalf("prefer %v: %v", features, err)
	}
}
