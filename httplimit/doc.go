// Package httplimit puts limits in front of HTTP handlers: middleware for net/http, and for every router that
// takes a func(http.Handler) http.Handler, as chi and Echo do.
//
//	limited, err := httplimit.New(limiter, httplimit.Config{
//		Limits: []httplimit.Limit{
//			{Limit: PerAddress, Key: address},
//			{LimitFor: planOf, Key: apiKey, Cost: httplimit.StatedCost{Header: "X-Tokens", Max: 4000}, Unit: "tokens"},
//			{Limit: Everybody, Global: true},
//		},
//	})
//	http.Handle("/chat", limited(chat))
//	router.Use(limited)                      // chi
//	router.Use(echo.WrapMiddleware(limited)) // Echo; docs/guide.md has a function for Gin
//
// Echo answers the error of a handler after the middleware has returned. A [Limit.Credit] sees the status only if a
// middleware inside of it calls c.Echo().HTTPErrorHandler.
//
// # What is charged when
//
// A request takes from all limits that apply to it, or from none: it is one call of
// [ratelimit.Limiter.Take], in one round trip, committed before the handler runs. No transaction is open while
// the handler works or the client is slow. The handler runs once when the limits allow the request, and
// not at all otherwise.
//
//   - A refused request is charged nothing, and neither is one that has no key or a cost that cannot be taken.
//   - An allowed request is charged whatever becomes of it: when the handler fails or panics, and when the client
//     goes away. [Limit.Credit] gives back by the status of the response; [Admission.Settle] and
//     [Admission.Credit] let the handler say what it cost.
//   - When the store fails, the request is answered 503, or let through where [Config.FailOpen] is set. It may have
//     been charged when the store fails or gets slow during the call. It was not when the store cannot be reached.
//
// A process that dies while a request is served gives nothing back, but for slots.
//
// # What is held while the handler runs
//
// A limit that is a [ratelimit.Concurrency], in the code or by a stored rule, lets so many requests in at a time. Its slots
// are acquired in the same call in which the other limits take, all or nothing ([ratelimit.Limiter.Acquire]), and released
// when the handler has returned or panicked, whatever the client does. They are held for as long as the handler streams, and
// while it has hijacked the connection. Leases are renewed meanwhile. When one is lost the request's context ends with the
// cause [ratelimit.ErrLeaseLost], and a [LeaseLost] is told; the handler finds its lease with [ratelimit.LeaseFromContext]. A
// slot that cannot be released is free when its lease ends, as is that of a process that died. docs/slots.md says what a
// handler must do.
//
// What has to be charged in the same transaction as the handler's own writes, so that a rollback gives it
// back, is not for middleware: take it in that transaction with [ratelimit.Limiter.WithTx] and Require, and answer with
// [Respond], which does what the middleware does. [Merge] states what is left of it beside what the middleware has stated.
//
// # What the client sees
//
// With a decision, allowed or refused: the fields that [Config.Headers] chooses, RateLimit-Policy and RateLimit by
// default, as in draft-ietf-httpapi-ratelimit-headers-11, which is a draft. They hold whole numbers from 0 up, and
// no key. [Config.AlsoHeaders] adds other forms, for clients that know no others.
//
// A request that is not let through is answered with Cache-Control: no-store, RateLimit-Reason, and a body
// as problem+json, plain text or a page, by its Accept field:
//
//	429 quota-exceeded              a limit refused; Retry-After is the longest wait among those that did
//	429 abnormal-usage-detected     the same, for limits with Abuse
//	429 temporary-reduced-capacity  a limit is paused; Retry-After is when its pause ends, and why is not told. Or a limit
//	                                adapts to an upstream that has throttled, and gives less than its contract
//	400 bad-key                     the request does not say who it is from
//	400 bad-cost                    it states a cost that cannot be taken
//	413 too-costly                  it costs more than a limit can ever hold; no Retry-After, as no wait helps
//	503 not-decided                 the store failed, was too slow, or too contended; Retry-After is 1
//
// Retry-After is in whole seconds, rounded up: a lone caller who waits that long is let through. The body of a problem has the wait
// in milliseconds, too:
//
//	{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded", "status":429,
//	 "title":"Request cannot be satisfied as assigned quota has been exceeded",
//	 "detail":"sendMessage: 10 per minute; retry in 5 s", "violated-policies":["sendMessage"], "retry_after_ms":4800}
//
// # Pages of other origins
//
// Put the CORS middleware around this one:
//
//	handler := cors(limited(chat))
//
// It answers preflights, which then are neither counted nor refused, and a refusal has its fields, without which a page could not
// read the status. In the other order a preflight is a request like any other, which has no cookie and no key: pass [IsPreflight] as
// Config.Skip there. For a page to read what is left, the CORS middleware has to name the fields:
//
//	Access-Control-Expose-Headers: RateLimit, RateLimit-Policy, RateLimit-Reason, Retry-After
//
// and those of other forms, where they are chosen.
//
// # Policies that are not in the code
//
// Where the limiter has [ratelimit.Config.Policies], they decide: fields, 413s, refusals and the client's state are
// those of the policy that decided, for the plan that [Limit.Plan] says, and change with it without a restart. New
// checks no cost against the capacity in the code then.
//
// # Trying a limit
//
// A limit in the mode [ratelimit.Shadow] turns nobody away, and no field tells of it. It takes tokens while it has enough, so that its
// refusals are those that it would cause. The Observer gets them. A stored rule has a mode. For a limit that only the code defines:
//
//	ratelimit.New(pool, ratelimit.Config{Policies: ratelimit.ShadowLimits(Everybody), Observer: observer})
//
// If all limits of a request are in shadow or off, the request passes without a key, with any cost, and when the store fails.
//
// # Upstreams
//
// [Transport] is for the other side: a program that calls an upstream whose limits it shares with other processes. It reports
// what the upstream answers to a [ratelimit.Adaptive] limit.
//
// # What is counted
//
// The limiter's Observer, such as one of promlimit, otellimit or sloglimit, is told what became of each request as
// a [ratelimit.Answered], by [Config.Route]: what was let through or turned away undecided, and what had no key, too.
// What a limit in shadow mode would have refused is an Answered with Shadow. The decision itself is a [ratelimit.Decided], on the
// goroutine and with the context of the request.
package httplimit
