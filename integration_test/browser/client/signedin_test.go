package client_test

import (
	"encoding/json"
	"net/http"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// calls gives a token every 100 ms, perHour one every 20 hours.
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

// newSignedInSite serves a site where users sign in, spend tokens, and see their remaining tokens. Its clock stands still until a
// request sets it, in microseconds since 1970, with the header clockHeader.
func newSignedInSite(t *testing.T) *site {
	t.Helper()
	var clock atomic.Int64
	clock.Store(time.Date(2026, time.March, 1, 12, 0, 0, 0, time.UTC).UnixMicro())
	limiter, err := ratelimit.New(postgrestest.New(t), ratelimit.Config{AsOf: func() time.Time { return time.UnixMicro(clock.Load()) }})
	require.NoError(t, err)
	state := newClientState(t, limiter, sessionUser, perHour, calls)
	mux := http.NewServeMux()
	mux.HandleFunc("/limits", func(w http.ResponseWriter, r *http.Request) {
		setClock(&clock, r)
		state.ServeHTTP(w, r)
	})
	mux.HandleFunc("POST /session", func(w http.ResponseWriter, r *http.Request) {
		http.SetCookie(w, &http.Cookie{Name: "session", Value: r.FormValue("session"), Path: "/", HttpOnly: true, SameSite: http.SameSiteLaxMode})
	})
	mux.HandleFunc("POST /take", func(w http.ResponseWriter, r *http.Request) {
		setClock(&clock, r)
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

const clockHeader = "X-Clock-Us"

func setClock(clock *atomic.Int64, r *http.Request) {
	if us, err := strconv.ParseInt(r.Header.Get(clockHeader), 10, 64); err == nil {
		clock.Store(us)
	}
}

// prelude is what the pages of the site have in common. Their wall clock is wrong, and jumps.
const prelude = `
	let calendar = 0;
	Date.now = () => (calendar += 1e9);
	const { createClient } = await import('/ratelimit.js');
	const still = { now: () => 1e6, timeoutMs: 3600e3 }; // for pages on which no time passes
	const signIn = (session) => fetch('/session?session=' + session, { method: 'POST' });
	const take = async (limit, cost, headers = {}) =>
		(await fetch('/take?limit=' + limit + '&cost=' + cost, { method: 'POST', headers })).json();
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
		const client = createClient({ url: '/limits', ...still });
		await until(client, () => client.check('perHour'));
		const before = client.check('perHour').remaining;
		await take('perHour', 3.5);
		await client.refresh();
		return [before, client.check('perHour').remaining];`))

	require.Equal(t, []float64{5, 5, 5, 5}, play[[]float64](t, bob, prelude+`
		await signIn('s-bob');
		const left = [];
		for (const [url, headers] of [
			['/limits', {}], ['/limits?key=alice&user=alice&session=s-alice&limit=perHour', {}],
			['/limits/../limits?name=alice', {}], ['/limits', { 'X-User': 'alice', 'X-Forwarded-For': '10.0.0.1' }],
		]) {
			const client = createClient({ url, ...still, fetch: (to, init) => fetch(to, { ...init, headers }) });
			await client.refresh();
			left.push(client.check('perHour').remaining);
			client.close();
		}
		return left;`))

	require.Equal(t, []any{"", 403.0, nil}, play[[]any](t, stranger, prelude+`
		const answer = await fetch('/limits');
		const client = createClient({ url: '/limits', ...still });
		await client.refresh();
		return [(await answer.text()).includes('value') ? 'told' : '', client.error.status, client.check('perHour')];`))

	require.Equal(t, []any{1.5, 403.0, nil, 5.0}, play[[]any](t, alice, prelude+`
		const client = createClient({ url: '/limits', ...still });
		await client.refresh();
		const seen = [client.check('perHour').remaining];
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
//
// The page and the server share one clock, which the page moves: by the travel times of a request and its answer, and by five
// milliseconds at each look.
func TestSignedInCallersAreToldWhenToComeBack(t *testing.T) {
	t.Parallel()
	type spent struct {
		Shown      []float64 `json:"shown"` // what remains, from one poll until it is enough
		Shortest   float64   `json:"shortestMs"`
		OK         bool      `json:"ok"`
		RetryAfter float64   `json:"retryAfterUs"`
	}
	got := play[struct {
		Spent []spent `json:"spent"`
		Polls int     `json:"polls"`
	}](t, newSignedInSite(t).browser, prelude+`
		await signIn('s-alice');
		const trips = [[30, 90], [90, 30], [2, 40], [40, 2], [5, 25], [18, 2], [4, 4], [7, 1]]; // there and back
		let ms = 1e10, polls = 0, shortest = Infinity;
		const now = () => ms; // from an origin of its own
		const atServer = () => ({ '`+clockHeader+`': String(1.7e15 + Math.round(ms * 1000)) });
		const travel = async (url, init) => {
			const [there, back] = trips[polls++];
			shortest = Math.min(shortest, there + back);
			ms += there;
			const response = await fetch(url, { ...init, headers: { ...init.headers, ...atServer() } });
			ms += back;
			return response;
		};
		const client = createClient({ url: '/limits', pollMs: 3600e3, tickMs: 1, timeoutMs: 3600e3, now, fetch: travel });
		await until(client, () => client.check('calls'));
		const spent = [];
		for (let i = 0; i < 7; i++) {
			await take('calls', client.check('calls').remaining * 0.9, atServer()); // almost all there is
			await client.refresh();
			const shown = [];
			await until(client, () => {
				ms += 5;
				const answer = client.check('calls', 1.5); // both answers are of one instant
				shown.push(answer.remaining);
				return answer.ok;
			});
			spent.push({ shown, shortestMs: shortest, ...await take('calls', 1.5, atServer()) });
		}
		return { spent, polls };`)
	require.Len(t, got.Spent, 7)
	require.Equal(t, 8, got.Polls, "as many as the client remembers")
	early := 0
	for _, s := range got.Spent {
		require.Greater(t, len(s.Shown), 1)
		require.IsIncreasing(t, s.Shown)
		require.Less(t, s.Shown[len(s.Shown)-2], 1.5)
		require.GreaterOrEqual(t, s.Shown[len(s.Shown)-1], 1.5)
		if !s.OK {
			early++
			require.LessOrEqual(t, s.RetryAfter, s.Shortest*1000/2)
		}
	}
	require.Positive(t, early, "some ways there are the longer ones")
	require.Less(t, early, 7, "and some are not")
}
