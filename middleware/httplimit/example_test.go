package httplimit_test

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Variables of a program that the examples use.
var (
	limiter   *ratelimit.Limiter                                     // of ratelimit.New
	apiKey    = httplimit.Header("X-API-Key")                        // as the client states it
	address   = httplimit.ClientIP(httplimit.Peer, httplimit.Bits{}) // who invents keys still has one
	PerIP     = ratelimit.Define("perIP", ratelimit.PerMinute(120))
	PerKey    = ratelimit.Define("perKey", ratelimit.PerMinute(60))
	KeyTokens = ratelimit.Define("keyTokens", ratelimit.PerDay(200_000))
	Everybody = ratelimit.Define("everybody", ratelimit.PerSecond(500))
	Messages  = ratelimit.Define("messages", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
)

func ExampleNew() {
	limited, err := httplimit.New(limiter, httplimit.Config{
		Limits: []httplimit.Limit{
			{Limit: PerIP, Key: address},
			{Limit: PerKey, Key: apiKey},
			{Limit: KeyTokens, Key: apiKey, Cost: httplimit.StatedCost{Header: "X-Max-Tokens", Max: 8000}, Unit: "tokens"},
			{Limit: Everybody, Global: true},
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	http.Handle("/complete", limited(http.HandlerFunc(complete)))
}

// complete answers, and settles the real cost. If a charge belongs to a write of the handler, take it in the handler's
// transaction instead: see the example of Respond.
func complete(w http.ResponseWriter, r *http.Request) {
	answer, tokens := "forty-two", 317.0
	if admission, ok := httplimit.FromContext(r.Context()); ok {
		if err := admission.Settle(r.Context(), tokens, KeyTokens); err != nil {
			log.Print(err)
		}
		state, _ := admission.State(PerKey)
		w.Header().Set("X-Requests-Left", fmt.Sprintf("%.0f", state.Remaining))
	}
	_, _ = io.WriteString(w, answer)
}

// A handler that writes takes the tokens in the transaction of its writes, so that a rollback returns them. It answers
// as the middleware does. The sign-in in front of it has verified the author and put it into the context.
func ExampleRespond() {
	type signedIn struct{}
	http.HandleFunc("POST /messages", func(w http.ResponseWriter, r *http.Request) {
		author, ok := r.Context().Value(signedIn{}).(string)
		if !ok {
			http.Error(w, "sign in first", http.StatusUnauthorized)
			return
		}
		err := limiter.InTx(r.Context(), func(tx pgx.Tx) error {
			if err := limiter.WithTx(tx).Require(r.Context(), Messages.For(author)); err != nil {
				return err // rolls back
			}
			_, err := tx.Exec(r.Context(), "INSERT INTO messages (author, body) VALUES ($1, $2)", author, r.FormValue("body"))
			return err
		})
		switch {
		case httplimit.Respond(w, r, err):
		case err != nil:
			http.Error(w, "the message was not sent", http.StatusInternalServerError)
		default:
			w.WriteHeader(http.StatusCreated)
		}
	})
}

// A handler that takes tokens itself merges its decision into the header fields that the middleware has set.
func ExampleMerge() {
	http.HandleFunc("GET /preview", func(w http.ResponseWriter, r *http.Request) {
		var d ratelimit.Decision
		who, err := address.Of(r)
		if err == nil {
			d, err = limiter.Take(r.Context(), PerIP.For(who).Cost(5))
		}
		if err == nil {
			err = d.Err()
		}
		if err != nil {
			if !httplimit.Respond(w, r, err) {
				http.Error(w, "there is no preview", http.StatusInternalServerError)
			}
			return
		}
		httplimit.Merge(w, r, d)
		_, _ = io.WriteString(w, "a preview")
	})
}

// A limit on failed logins counts attempts, and returns the token if the login succeeds. Normalize the account, or each
// spelling of it has a bucket of its own. A second limit by address bounds an attacker who tries one password on many
// accounts.
func ExampleCountOnlyFailures() {
	failedLogins := ratelimit.Define("failedLogins", ratelimit.PerHour(10))
	account := func(r *http.Request) (string, error) {
		return strings.ToLower(strings.TrimSpace(r.FormValue("account"))), nil
	}
	limited, err := httplimit.New(limiter, httplimit.Config{
		Limits: []httplimit.Limit{
			{Limit: PerIP, Key: address},
			{Limit: failedLogins, Key: account, Credit: httplimit.CountOnlyFailures},
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	http.Handle("POST /login", limited(http.HandlerFunc(complete)))
}
