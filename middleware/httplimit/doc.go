// Package httplimit limits requests to HTTP handlers. It is middleware for net/http, and for routers that take a
// func(http.Handler) http.Handler, for example chi and Echo.
//
//	limited, err := httplimit.New(limiter, httplimit.Config{
//		Limits: []httplimit.Limit{
//			{Limit: PerAddress, Key: address},
//			{Limit: PerKey, Key: apiKey, Cost: httplimit.StatedCost{Header: "X-Tokens", Max: 4000}, Unit: "tokens"},
//			{Limit: Everybody, Global: true},
//		},
//	})
//	http.Handle("/chat", limited(chat))
//	router.Use(limited)                      // chi
//	router.Use(echo.WrapMiddleware(limited)) // Echo; for Gin see docs/guide.md
//
// # Charges
//
// A request takes from all limits that apply to it, or from none. It is one call of [ratelimit.Limiter.Take], which
// commits before the handler runs. No transaction is open while the handler works or the client is slow.
//
//   - A refused request costs nothing. A request without a key, or with an invalid cost, costs nothing either.
//   - An allowed request stays charged if the handler fails or panics, or if the client disconnects. [Limit.Credit] returns
//     tokens by the status of the response. [Admission.Settle] and [Admission.Credit] let the handler state the actual cost.
//     Echo writes the status of an error after the middleware has returned, unless a middleware inside of it calls
//     c.Echo().HTTPErrorHandler.
//   - If the store fails, the answer is 503, or the handler runs if [Config.FailOpen] is set. If the store failed during the
//     call, the request may be charged. A process that dies returns no tokens.
//   - To charge in the transaction of the handler's own writes, take there with [ratelimit.Limiter.WithTx] and Require, and
//     send a refusal with [Respond]. [Merge] adds the fields of that decision to the response.
//
// A request holds its slots of a [ratelimit.Concurrency] until the handler has returned or panicked, also while it
// streams or has hijacked the connection. The middleware renews their leases. If a lease is lost, the context of the
// request ends with the cause [ratelimit.ErrLeaseLost]. docs/slots.md lists the duties of a handler.
//
// # Responses
//
// Responses carry the fields that [Config.Headers] chooses: by default RateLimit-Policy and RateLimit of
// draft-ietf-httpapi-ratelimit-headers-11. They have whole numbers from 0, and no key. A refusal has Cache-Control:
// no-store, RateLimit-Reason, and a body as problem+json, plain text or a page, by its Accept field:
//
//	429 quota-exceeded              a limit refused; Retry-After is the longest wait of the refusing limits
//	429 temporary-reduced-capacity  a limit is paused until Retry-After
//	400 bad-key                     the request has no key
//	400 bad-cost                    it states an invalid cost
//	413 too-costly                  it costs more than a limit can ever hold; no Retry-After, because waiting does not help
//	503 not-decided                 the store failed, was too slow, or too contended; Retry-After is 1
//
// Retry-After is in whole seconds, rounded up. The body has the wait in milliseconds, as retry_after_ms.
//
// # CORS, modes and events
//
// Put the CORS middleware around this one, as in cors(limited(chat)): it answers preflights before they are counted,
// and adds its fields to refusals. In the other order pass [IsPreflight] as Config.Skip. For pages of other origins,
// name the fields:
//
//	Access-Control-Expose-Headers: RateLimit, RateLimit-Policy, RateLimit-Reason, Retry-After
//
// If the limiter has [ratelimit.Config.Policies], stored rules decide, for the plan that [Limit.Plan] returns. A limit
// in the mode [ratelimit.Shadow] refuses no request and sets no field. If all limits of a request are in shadow or off,
// the request passes without a key, with any cost, and when the store fails. The limiter's Observer receives a
// [ratelimit.Answered] for each request, by [Config.Route], and a [ratelimit.Decided] for each decision. [Transport]
// limits requests to an upstream.
package httplimit
