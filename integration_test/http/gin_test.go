package http_test

import (
	"errors"
	"net/http"
	"testing"

	"github.com/gin-gonic/gin"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// forGin is in docs/guide.md, and TestBlocksAreRun of docs/links finds it here.
func forGin(limited func(http.Handler) http.Handler) gin.HandlerFunc {
	return func(c *gin.Context) {
		allowed := false
		limited(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			allowed, c.Request = true, r
			c.Next()
			w.WriteHeader(c.Writer.Status()) // a Credit reads it
		})).ServeHTTP(c.Writer, c.Request)
		if !allowed {
			c.Abort()
		}
	}
}

// ginRouter wraps the middleware by forGin, for the router and for a route.
func ginRouter(everything, search func(http.Handler) http.Handler) http.Handler {
	router := gin.New()
	router.Use(forGin(everything))
	router.GET("/", func(c *gin.Context) { c.String(http.StatusOK, "home") })
	router.GET("/search", forGin(search), func(c *gin.Context) { c.String(http.StatusOK, "found") })
	return router
}

// TestCreditsBehindGin promises that a Credit sees the status of a handler of Gin, also of a panicking handler, and that the
// handler has the middleware's context.
func TestCreditsBehindGin(t *testing.T) {
	t.Parallel()
	limiter := ratelimittest.New(t, ratelimittest.NewClock())
	limit := userLimit
	limit.Credit = httplimit.CreditOn5xx
	router := gin.New()
	router.Use(gin.CustomRecoveryWithWriter(nil, func(c *gin.Context, _ any) { c.AbortWithStatus(http.StatusInternalServerError) }), forGin(limited(t, limiter, limit)))
	router.GET("/:status", func(c *gin.Context) {
		admission, ok := httplimit.FromContext(c.Request.Context())
		require.True(t, ok)
		require.True(t, admission.Decision().Allowed)
		switch c.Param("status") {
		case "panic":
			panic(errors.New("the handler's own"))
		case "500":
			c.AbortWithStatus(http.StatusInternalServerError)
		default:
			c.Status(http.StatusNoContent)
		}
	})
	for _, c := range []struct {
		path    string
		status  int
		charged float64
	}{{"/204", 204, 1}, {"/500", 500, 1}, {"/panic", 500, 1}, {"/204", 204, 2}} {
		require.Equal(t, c.status, get(t, router, c.path).Code, c.path)
		require.Equal(t, c.charged, charged(t, limiter, perUser.For("ada")), c.path)
	}
}
