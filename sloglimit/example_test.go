package sloglimit_test

import (
	"log/slog"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sloglimit"
)

// Refusals are expected here, so only failures and worse are worth a line.
func Example() {
	var pool *pgxpool.Pool // of the application
	logger := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	_, _ = ratelimit.New(pool, ratelimit.Config{
		Observer: sloglimit.New(sloglimit.Config{Logger: logger, Refused: slog.LevelDebug}),
	})
}
