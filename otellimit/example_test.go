package otellimit_test

import (
	"log"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/otellimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sloglimit"
)

// Metrics and spans go to the providers that the application has set, and failures to its log as well.
func Example() {
	var pool *pgxpool.Pool // of the application
	observer, err := otellimit.New(otellimit.Config{})
	if err != nil {
		log.Fatal(err)
	}
	_, _ = ratelimit.New(pool, ratelimit.Config{
		Observer: ratelimit.Observers(observer, sloglimit.New(sloglimit.Config{Refused: slog.LevelDebug})),
	})
}
