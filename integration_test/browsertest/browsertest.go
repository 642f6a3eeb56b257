// Package browsertest finds a browser of the Chromium family and starts it for a test, without a window. Axe looks for
// what keeps people from using the page that it shows.
//
// It takes the program that RATELIMIT_BROWSER names, else the first of Chromium, Google Chrome and Microsoft
// Edge in PATH and in the places where they are installed. Without one a test is skipped, with the reason, on
// a developer's machine, and fails when CI is set. A program that was named and is not there is a failure in
// both.
package browsertest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// How long a browser may take until it answers, which a busy machine reads from disk, and until it has ended.
const (
	startTimeout = 3 * time.Minute
	closeTimeout = 2 * time.Minute
)

var errNoBrowser = errors.New("no browser to use: apt-get install chromium, brew install --cask chromium, or name " +
	"one in RATELIMIT_BROWSER")

// programs are what browsers are called, and where they are when PATH does not have them.
func programs() []string {
	return []string{
		"chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless-shell", "chrome", "msedge",
		"/usr/bin/chromium", "/usr/bin/google-chrome", "/snap/bin/chromium",
		"/Applications/Chromium.app/Contents/MacOS/Chromium",
		"/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
		`C:\Program Files\Google\Chrome\Application\chrome.exe`,
		`C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe`,
	}
}

// find returns the program to start.
func find(named string, programs []string) (string, error) {
	if named != "" {
		path, err := exec.LookPath(named)
		if err != nil {
			return "", fmt.Errorf("RATELIMIT_BROWSER: %w", err)
		}
		return path, nil
	}
	for _, program := range programs {
		if path, err := exec.LookPath(program); err == nil {
			return path, nil
		}
	}
	return "", errNoBrowser
}

const startsABrowser = "starts a browser"

// New starts a browser for the test, which is a long one, and returns the context of its first tab, for chromedp.Run.
// Others are made from it with chromedp.NewContext, and chromedp.WithNewBrowserContext gives one cookies of its own.
// The browser ends with the test, and nothing of it is left.
func New(t testing.TB) context.Context {
	t.Helper()
	testkit.Long(t, startsABrowser)
	tab, stop, err := start()
	skipOrFail(t, err)
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	return tab
}

// Shared is one browser for the long tests of a package, which the first that asks starts: to start one takes longer
// than most tests. The zero value is ready.
type Shared struct {
	once sync.Once
	tab  context.Context //nolint:containedctx // chromedp's contexts are its tabs
	stop func() error
	err  error
}

// Tab returns a new tab with cookies of its own, for chromedp.Run. It is closed with the test.
func (s *Shared) Tab(t testing.TB, options ...chromedp.ContextOption) context.Context {
	t.Helper()
	testkit.Long(t, startsABrowser)
	s.once.Do(func() { s.tab, s.stop, s.err = start() })
	skipOrFail(t, s.err)
	tab, stop := chromedp.NewContext(s.tab, append(options, chromedp.WithNewBrowserContext())...)
	t.Cleanup(stop)
	return tab
}

// Close ends the browser, if one was started. TestMain calls it when the tests are over.
func (s *Shared) Close() error {
	if s.stop == nil {
		return nil
	}
	return s.stop()
}

// skipOrFail ends the test where no browser was started.
func skipOrFail(t testing.TB, err error) {
	t.Helper()
	switch {
	case mayBeSkipped(err, os.Getenv("CI") != ""):
		t.Skip(err)
	case err != nil:
		t.Fatal(err)
	}
}

// start starts a browser, and returns its first tab and what ends it.
func start() (tab context.Context, stop func() error, err error) {
	path, err := find(os.Getenv("RATELIMIT_BROWSER"), programs())
	if err != nil {
		return nil, nil, err
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path),
		chromedp.DisableGPU,
		chromedp.Flag("disable-quic", true),
		chromedp.Flag("disable-component-update", true),
		chromedp.WSURLReadTimeout(startTimeout),
	)
	if os.Geteuid() == 0 {
		options = append(options, chromedp.NoSandbox) // its sandbox refuses to work for root
	}
	allocator, end := chromedp.NewExecAllocator(context.Background(), options...) // outlives t.Context()
	tab, kill := chromedp.NewContext(allocator)
	stop = func() error { // asks the browser to end, because a killed browser leaves files behind
		defer end()
		defer kill()
		closing, cancel := context.WithTimeout(tab, closeTimeout)
		defer cancel()
		if err := chromedp.Cancel(closing); err != nil {
			return fmt.Errorf("close %s: %w", path, err)
		}
		return nil
	}
	if err := chromedp.Do(tab); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("start %s: %w", path, err), stop())
	}
	return tab, stop, nil
}

// mayBeSkipped reports whether a test without a browser may be skipped. In CI it may not.
func mayBeSkipped(err error, ci bool) bool { return errors.Is(err, errNoBrowser) && !ci }
