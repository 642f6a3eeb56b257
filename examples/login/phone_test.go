package main

import (
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
)

// patient is how long a test waits for what has to happen. It only ends a test that hangs.
const patient = 2 * time.Minute

// On a phone the page has to be scrolled to no side, each of its fields and buttons can be tapped, and nothing keeps people
// from using it, whatever it says.
func TestPageOnAPhone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	server := httptest.NewServer(b.handler)
	t.Cleanup(server.Close)
	tab := browsertest.New(t)
	requireFits := func(state string) {
		for _, width := range []int64{390, 360} {
			for _, scheme := range []string{"light", "dark"} {
				browsertest.AsPhone(t, tab, width, scheme)
				require.Empty(t, browsertest.Misfits(t, tab, width), "%s, at %d", state, width)
				require.Empty(t, browsertest.Axe(t, tab), "%s, %s", state, scheme)
			}
		}
	}
	requireShows := func(text string) {
		require.Eventually(t, func() bool { // a page that is on its way out answers with an error
			shown, err := chromedp.Run(tab, chromedp.Evaluate[string](`document.body.innerText`))
			return err == nil && strings.Contains(shown, text)
		}, patient, time.Millisecond)
	}
	signIn := func(login, password, shows string) {
		require.NoError(t, chromedp.Do(tab, chromedp.Navigate(server.URL)))
		require.NoError(t, chromedp.Do(tab, chromedp.SetValue("#login", login)))
		require.NoError(t, chromedp.Do(tab, chromedp.SetValue("#password", password)))
		require.NoError(t, chromedp.Do(tab, chromedp.Submit("#password")))
		requireShows(shows)
	}
	require.NoError(t, chromedp.Do(tab, chromedp.Navigate(server.URL)))
	requireFits("the form")
	signIn("ada", passwordOf("ada"), "You are")
	requireFits("signed in")
	require.NoError(t, chromedp.Do(tab, chromedp.Submit("form")))
	requireShows("E-mail or name")
	signIn(strings.Repeat("a", 254), "oops", "The login or the password is wrong.")
	requireFits("a login that fills its field")
	for range 5 {
		b.from(here, "ada", "oops")
	}
	signIn("ada", "oops", "The password was not checked.")
	requireFits("too many attempts")
}
