package client_test

import (
	"encoding/json"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// calls gives a token every 100 ms, perHour none while a test runs.
var (
	calls   = ratelimit.Define("calls", ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 5})
	perHour = ratelimit.Define("perHour", ratelimit.TokenBucket{Rate: 5, Period: 100 * time.Hour})
)

// sessions are the users of the site by the value of their cookie.
var sessions = map[string]string{"s-alice": "alice", "s-bob": "bob"}

func sessionUser(r *http.Request) (string, error) {
	cookie, err := r.Cookie("session")
	if err != nil || sessions[cookie.Value] == "" {
		return "", httplimit.ErrNoKey
	}
	return sessions[cookie.Value], nil
}

// newSignedInSite serves a site where users sign in, spend tokens, and are told what they have left.
func newSignedInSite(t *testing.T) *site {
	t.Helper()
	limiter, err := ratelimit.New(postgrestest.New(t), ratelimit.Config{})
	require.NoError(t, err)
	state, err := httplimit.NewClientState(httplimit.ClientStateConfig{
		Limiter: limiter, Key: sessionUser, Limits: []ratelimit.Limit{perHour, calls},
	})
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("/limits", state)
	mux.HandleFunc("POST /session", func(w http.ResponseWriter, r *http.Request) {
		http.SetCookie(w, &http.Cookie{Name: "session", Value: r.FormValue("session"), Path: "/", HttpOnly: true, SameSite: http.SameSiteLaxMode})
	})
	mux.HandleFunc("POST /take", func(w http.ResponseWriter, r *http.Request) {
		user, err := sessionUser(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		limit := map[string]ratelimit.Limit{"calls": calls, "perHour": perHour}[r.FormValue("limit")]
		cost, _ := strconv.ParseFloat(r.FormValue("cost"), 64)
		decision, err := limiter.Take(r.Context(), limit.For(user).Cost(cost))
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"ok": decision.Allowed, "retryAfterUs": decision.RetryAfter.Microseconds()})
	})
	return newSite(t, mux)
}

// prelude is what the pages of the site have in common. Their wall clock is wrong, and jumps.
const prelude = `
	let calendar = 0;
	Date.now = () => (calendar += 1e9);
	const { createClient } = await import('/ratelimit.js');
	const signIn = (session) => fetch('/session?session=' + session, { method: 'POST' });
	const take = async (limit, cost) => (await fetch('/take?limit=' + limit + '&cost=' + cost, { method: 'POST' })).json();
	const until = (client, ready) => new Promise((resolve) => {
		const end = client.subscribe(() => { if (ready()) { end(); resolve(); } });
	});
`

// TestSignedInCallersSeeTheirOwnStateOnly has alice spend, bob try to see it, and a stranger try to see anything.
func TestSignedInCallersSeeTheirOwnStateOnly(t *testing.T) {
	t.Parallel()
	site := newSignedInSite(t)
	alice, bob, stranger := site.browser, site.newTab(t), site.newTab(t)

	require.Equal(t, []float64{5, 1.5}, play[[]float64](t, alice, prelude+`
		await signIn('s-alice');
		const client = createClient({ url: '/limits' });
		await until(client, () => client.check('perHour'));
		const before = client.check('perHour').remaining;
		await take('perHour', 3.5);
		await client.refresh();
		return [before, Math.round(client.check('perHour').remaining * 1000) / 1000];`))

	require.Equal(t, []float64{5, 5, 5, 5}, play[[]float64](t, bob, prelude+`
		await signIn('s-bob');
		const left = [];
		for (const [url, headers] of [
			['/limits', {}], ['/limits?key=alice&user=alice&session=s-alice&limit=perHour', {}],
			['/limits/../limits?name=alice', {}], ['/limits', { 'X-User': 'alice', 'X-Forwarded-For': '10.0.0.1' }],
		]) {
			const client = createClient({ url, fetch: (to, init) => fetch(to, { ...init, headers }) });
			await client.refresh();
			left.push(client.check('perHour').remaining);
			client.close();
		}
		return left;`))

	require.Equal(t, []any{"", 403.0, nil}, play[[]any](t, stranger, prelude+`
		const answer = await fetch('/limits');
		const client = createClient({ url: '/limits' });
		await client.refresh();
		return [(await answer.text()).includes('value') ? 'told' : '', client.error.status, client.check('perHour')];`))

	require.Equal(t, []any{1.5, 403.0, nil, 5.0}, play[[]any](t, alice, prelude+`
		const client = createClient({ url: '/limits' });
		await client.refresh();
		const seen = [Math.round(client.check('perHour').remaining * 1000) / 1000];
		await signIn('');
		await client.refresh();
		seen.push(client.error.status, client.check('perHour'));
		await signIn('s-bob'); // at the same machine
		await client.refresh();
		return [...seen, client.check('perHour').remaining];`))
}

// TestSignedInCallersAreToldWhenToComeBack has a page wait for tokens by its own reckoning, with no poll meanwhile,
// and spend each as soon as it believes that it is there. The server finds it no earlier than the client
// can know the server's clock: half of its shortest round trip.
func TestSignedInCallersAreToldWhenToComeBack(t *testing.T) {
	t.Parallel()
	type spent struct {
		Remaining  []float64 `json:"remaining"` // what was shown from one poll to the next
		OK         bool      `json:"ok"`
		RetryAfter float64   `json:"retryAfterUs"`
	}
	got := play[struct {
		Spent []spent `json:"spent"`
		Error float64 `json:"errorUs"`
		Polls int     `json:"polls"`
	}](t, newSignedInSite(t).browser, prelude+`
		await signIn('s-alice');
		const now = () => performance.now() + 1e10; // milliseconds from an origin of its own
		let polls = 0, shortest = Infinity;
		const timed = async (url, init) => {
			const began = now();
			const response = await fetch(url, init);
			shortest = Math.min(shortest, now() - began);
			polls++;
			return response;
		};
		const client = createClient({ url: '/limits', pollMs: 3600e3, tickMs: 5, now, fetch: timed });
		await until(client, () => client.check('calls'));
		const spent = [];
		for (let i = 0; i < 7; i++) {
			await take('calls', client.check('calls').remaining); // all there is
			await client.refresh();
			const remaining = [];
			await until(client, () => remaining.push(client.check('calls').remaining) && client.check('calls', 1.5).ok);
			spent.push({ remaining, ...await take('calls', 1.5) });
		}
		return { spent, errorUs: shortest * 1000 / 2, polls };`)
	require.Len(t, got.Spent, 7)
	require.Equal(t, 8, got.Polls, "as many as the client remembers")
	early := 0
	for _, s := range got.Spent {
		require.IsIncreasing(t, s.Remaining)
		require.GreaterOrEqual(t, s.Remaining[len(s.Remaining)-1], 1.5)
		if !s.OK {
			early++
			require.LessOrEqual(t, s.RetryAfter, got.Error+1000, "1 ms for what a browser rounds off its clock")
		}
	}
	t.Logf("%d of 7 early; half of the shortest round trip is %.0f µs", early, got.Error)
}
