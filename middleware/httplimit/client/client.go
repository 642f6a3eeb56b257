// Package client serves a JavaScript module that computes in the browser, between two polls, a limit's remaining tokens
// and the time until a retry. It polls the handler of [httplimit.NewClientState].
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
//	  limits.refresh(); // and the page updates the remaining tokens
//	};
//
// Show the answer, but don't rely on it, because other calls on the same key can take tokens meanwhile. [Handler] says
// how exact it is.
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
//
// The module has no dependencies and no global state. Its base is the pure function evaluate(state, at, cost), which
// gives the Go package's answers to the last bit, for a state from any source, for example one in the page. take(state,
// at, cost) returns the answer and the state after a Take, and reserve(state, at, cost, maxReserved) does the same for
// a Reserve, except for sliding windows and slots. The wait for slots is an upper bound, and for a calendar window,
// answers before the state's time aren't exact. Limits with Shards are refused, because a state holds only their rows'
// sum.
//
// The module estimates the server's clock from the polls' round trips, on performance.now(), with an error of at most
// half of the shortest in the last eight. A visible page polls every 15 seconds, or every pollMs, and more and more
// rarely while the server fails. If another user signs in without a new page, close the client and make another.
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
