// Package client serves a JavaScript module that computes in the browser, between two polls, the tokens left of a
// rate limit and the time until a retry. It polls the handler of [httplimit.NewClientState].
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
// The module has no dependencies and uses no global state. Its base is the pure function evaluate(state, at, cost). It
// gives the answers of the Go package to the last bit, for a state from any source, for example one in the page.
// take(state, at, cost) returns the answer and the state after a Take, and reserve(state, at, cost, maxReserved) does
// the same for a Reserve. Sliding windows and limits on concurrency have no reservations. The wait for slots is an
// upper bound: a slot becomes free when its lease ends, or earlier. For a calendar window, answers before the instant
// of the state are not exact. NewClientState refuses limits with Shards, because a state holds only the sum of their
// rows.
//
// The module does not use the page's clock. It estimates the server's clock from the round trips of the polls, on
// performance.now(), with an error of at most half of the shortest of the last eight. So an answer may be early or late
// by that much, and other calls on the same key may take tokens meanwhile: show the answer, but do not rely on it.
//
// A visible page polls every 15 seconds, or every pollMs, and more and more rarely while the server fails. If another
// user signs in without a new page, close the client and make another.
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
