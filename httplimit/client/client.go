// Package client serves the JavaScript module that computes in the browser, between two polls, what is left of
// a rate limit and when to come back. The handler of [httplimit.NewClientState] is what it polls.
//
//	state, err := httplimit.NewClientState(httplimit.ClientStateConfig{
//		Limiter: limiter,
//		Key:     sessionUser, // from the session, never from a parameter
//		Limits:  []ratelimit.Limit{SendMessage},
//	})
//	mux.Handle("/limits", state)
//	mux.Handle("/ratelimit.js", client.Handler())
//
// The page has <output id="left">, <button id="send"> and a module script, page.js. A Content-Security-Policy
// needs no more than script-src 'self' and connect-src 'self'.
//
//	import { createClient } from '/ratelimit.js';
//
//	const limits = createClient({ url: '/limits' });
//	const left = document.getElementById('left'), send = document.getElementById('send');
//
//	limits.subscribe(() => { // after each poll, and four times a second
//	  const answer = limits.check('sendMessage', 1); // null: not signed in, or nothing is known yet
//	  send.disabled = !answer?.ok;
//	  if (!answer) left.value = '';
//	  else if (answer.ok) left.value = `${Math.floor(answer.remaining)} left`;
//	  else left.value = `again in ${Math.ceil(answer.retryAfterUs / 1e6)} s`;
//	});
//	send.onclick = async () => {
//	  await fetch('/messages', { method: 'POST' }); // the server decides
//	  limits.refresh(); // and the page learns what is left
//	};
//
// The module has no dependencies and uses no global state. evaluate(state, at, cost) is the pure function
// beneath: the answers of the Go package to the last bit, for a state that came another way, as in the page; take(state,
// at, cost) is what would be left, and the answer, if the cost were taken, and reserve(state, at, cost, maxReserved) if it
// were reserved. Sliding windows and limits on concurrency have no reservations. Of slots the wait is the longest that it can be:
// they are free when the lease ends, or earlier. Of a calendar window instants before that of the state are not answered exactly.
// That is so for limits without Shards. Of one with Shards a state holds the sum of the rows, from which
// the answers would be those for rows that are level; NewClientState refuses it.
//
// The page's clock is not used. The server's is estimated from the round trips of the polls, right to half of
// the shortest of the last eight, on performance.now(), which nobody sets. So an answer may be early or late
// by that much, and others of the same key may take meanwhile: it is there to be shown, not to be relied on.
//
// A page polls while it is seen, every 15 seconds unless pollMs says otherwise, and more and more rarely while the
// server fails. When somebody else signs in without a new page, close the client and make another.
package client

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"net/http"
	"time"
)

//go:embed ratelimit.js
var module []byte

// Module returns a copy of the module's text, for a program that puts it into a page, or serves it in its own way.
func Module() []byte { return bytes.Clone(module) }

// Handler serves the module to GET and HEAD. Browsers keep it and ask each time whether it is still the one:
// the page, the module and the state it reads change together.
func Handler() http.Handler {
	sum := sha256.Sum256(module)
	tag := `"` + base64.RawURLEncoding.EncodeToString(sum[:]) + `"`
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		header.Set("X-Content-Type-Options", "nosniff")
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			header.Set("Allow", "GET, HEAD")
			http.Error(w, http.StatusText(http.StatusMethodNotAllowed), http.StatusMethodNotAllowed)
			return
		}
		header.Set("Content-Type", "text/javascript; charset=utf-8")
		header.Set("Cache-Control", "no-cache")
		header.Set("ETag", tag)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(module))
	})
}
