package admin_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/admintest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// TestLiveLevelFollowsOthers has another program take from the bucket that the page shows, and then change its policy.
func TestLiveLevelFollowsOthers(t *testing.T) {
	t.Parallel()
	f := setup(t)
	b := f.browse(t)
	b.open(t, admintest.Address("key", "limit", "failed-logins", "key", "ada"))
	shows := func(tokens, capacity string) {
		play[bool](t, b, fmt.Sprintf(`
			const figure = (name) => document.querySelector('[data-figure=' + name + ']').textContent;
			while (!figure('tokens').startsWith('%s') || figure('capacity') !== '%s') await new Promise(requestAnimationFrame);
			return true;`, tokens, capacity))
	}
	shows("10", "10")
	f.Take(t, logins.For("ada").Cost(7))
	shows("3", "10")
	f.Put(t, rules.Rule{Limit: "failed-logins", Policy: ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 2}})
	shows("2", "2")
}

// TestButtonIsPressedTwice before the answer came: the form is sent once. It may be sent again from a page that is gone back to.
func TestButtonIsPressedTwice(t *testing.T) {
	t.Parallel()
	f := setup(t)
	b := f.browse(t)
	b.open(t, admintest.Address("key", "limit", "failed-logins", "key", "ada"))
	stopped := play[[]bool](t, b, unfold+`
		const stopped = [], form = document.querySelector('form[action=reset]'), button = form.querySelector('button');
		form.addEventListener('submit', (event) => {
			stopped.push(event.defaultPrevented);
			event.preventDefault();
		});
		button.click();
		button.click();
		dispatchEvent(new Event('pageshow'));
		button.click();
		return stopped;`)
	require.Equal(t, []bool{false, true, false}, stopped)
}
