package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// work calls the upstream with each worker of this process, as fast as the limit lets it.
func work(ctx context.Context, o options) error {
	ctx, cancel := context.WithTimeout(ctx, 3*o.third)
	defer cancel()
	pool, err := pgxpool.New(ctx, os.Getenv("RATELIMIT_DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	if err != nil {
		return err
	}
	transport := &httplimit.Transport{Limiter: limiter, Take: true, Base: &http.Transport{MaxIdleConnsPerHost: workers}}
	defer transport.CloseIdleConnections()
	limit := ratelimit.Define("static", ratelimit.PerSecond(contract))
	if o.way == adaptiveWay {
		limit = ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerSecond(contract), Apply: true})
	} else {
		transport.Take = o.way == staticWay
	}
	if o.way != ungatedWay {
		transport.Request = func(*http.Request) (ratelimit.Request, bool) { return limit.For("account"), true }
	}
	client := &http.Client{Transport: transport}
	failed := make([]error, workers)
	var all sync.WaitGroup
	for i := range workers {
		all.Go(func() {
			for ctx.Err() == nil && failed[i] == nil {
				failed[i] = call(ctx, client, o.upstream)
			}
		})
	}
	all.Wait()
	return errors.Join(append(failed, limiter.Close(context.WithoutCancel(ctx)))...)
}

// call calls the upstream once, or waits as long as the limit asks.
func call(ctx context.Context, client *http.Client, address string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	var limited *ratelimit.LimitedError
	switch {
	case errors.As(err, &limited):
		timer := time.NewTimer(limited.Decision.RetryAfter + rand.N(20*time.Millisecond))
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		return nil
	case ctx.Err() != nil:
		return nil // the run has ended
	case err != nil:
		return fmt.Errorf("call: %w", err)
	}
	_, err = io.Copy(io.Discard, response.Body)
	return errors.Join(err, response.Body.Close())
}
