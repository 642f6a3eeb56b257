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
// A request takes from all limits that apply to it, or from none, in one call that commits before the handler runs. So
// it stays charged if the handler fails or the client disconnects; [Limit].Credit returns tokens by the response's
// status, and [Admission.Settle] charges the actual cost. To charge in the handler's own transaction, take there with
// [ratelimit.Limiter.WithTx], and answer a refusal with [Respond]. Slots of a [ratelimit.Concurrency] are held until
// the handler returns.
//
// [New] lists the answers to refused requests. If the store fails, the answer is 503, unless [Config].FailOpen lets the
// request pass. [Transport] limits requests to an upstream instead.
//
// # CORS
//
// Put the CORS middleware around this one, as in cors(limited(chat)), so preflights aren't counted and refusals get its
// fields. In the other order, pass [IsPreflight] as Config.Skip. For other origins' pages, name the fields:
//
//	Access-Control-Expose-Headers: RateLimit, RateLimit-Policy, RateLimit-Reason, Retry-After
package httplimit
