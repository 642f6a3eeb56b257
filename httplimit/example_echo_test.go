package httplimit_test

import (
	"log"
	"net/http"

	"github.com/labstack/echo/v5"

	"github.com/pgratelimit/pgratelimit/httplimit"
)

// echoRouter limits everything once, and one of the routes once more.
func echoRouter(everything, search func(http.Handler) http.Handler) http.Handler {
	router := echo.New()
	router.Use(echo.WrapMiddleware(everything))
	router.GET("/", func(c *echo.Context) error { return c.String(http.StatusOK, "home") })
	router.GET("/search", func(c *echo.Context) error { return c.String(http.StatusOK, "found") },
		echo.WrapMiddleware(search), answerErrors)
	return router
}

// answerErrors answers the errors of handlers. Echo itself does it after the middleware, which then cannot see their
// status: rules with a Refund need it inside, others do not.
func answerErrors(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c *echo.Context) error {
		if err := next(c); err != nil {
			c.Echo().HTTPErrorHandler(c, err)
		}
		return nil
	}
}

// With Echo the middleware is wrapped by echo.WrapMiddleware, for a router or a route.
func ExampleNew_echo() {
	everything, err := httplimit.New(limiter, httplimit.Config{Rules: []httplimit.Rule{{Limit: Everybody, Global: true}}})
	if err != nil {
		log.Fatal(err)
	}
	search, err := httplimit.New(limiter, httplimit.Config{Rules: []httplimit.Rule{
		{Limit: PerKey, Key: apiKey, Refund: httplimit.RefundOn5xx},
	}})
	if err != nil {
		log.Fatal(err)
	}
	http.Handle("/", echoRouter(everything, search))
}
