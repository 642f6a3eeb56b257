package promlimit_test

import (
	"log"
	"net/http"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/pgratelimit/pgratelimit/promlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func Example() {
	var pool *pgxpool.Pool // of the application
	observer, err := promlimit.New(promlimit.Config{})
	if err != nil {
		log.Fatal(err)
	}
	prometheus.MustRegister(observer)
	http.Handle("/metrics", promhttp.Handler())
	_, _ = ratelimit.New(pool, ratelimit.Config{Observer: observer})
}
