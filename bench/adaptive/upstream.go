package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// upstream accepts up to its current capacity, and answers 429 to the other requests.
type upstream struct {
	address string
	begun   time.Time
	third   time.Duration
	server  *http.Server

	mu                  sync.Mutex
	left                float64 // requests that it can accept now
	at                  time.Time
	accepted, throttled int64
}

// listen returns an upstream that serves on the loopback interface.
func listen(begun time.Time, third time.Duration) (*upstream, error) {
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	u := &upstream{address: "http://" + listener.Addr().String(), begun: begun, third: third, left: contract, at: begun}
	u.server = &http.Server{Handler: u, ReadHeaderTimeout: time.Minute}
	go func() { _ = u.server.Serve(listener) }() // until close
	return u, nil
}

func (u *upstream) close() { _ = u.server.Close() }

// ServeHTTP answers after 50 to 150 milliseconds.
func (u *upstream) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	half := time.Duration(25+rand.IntN(50)) * time.Millisecond
	time.Sleep(half)
	accepted := u.accept(time.Now())
	time.Sleep(half)
	if !accepted {
		w.WriteHeader(http.StatusTooManyRequests)
	}
}

// capacity returns the accepted requests a second at a time since the start.
func capacity(after, third time.Duration) float64 {
	if after >= third && after < 2*third {
		return fallen
	}
	return contract
}

func (u *upstream) accept(now time.Time) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	can := capacity(now.Sub(u.begun), u.third)
	u.left, u.at = min(can, u.left+can*max(now.Sub(u.at).Seconds(), 0)), now
	if u.left < 1 {
		u.throttled++
		return false
	}
	u.left--
	u.accepted++
	return true
}

func (u *upstream) counts() (accepted, throttled int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.accepted, u.throttled
}

// path holds samples of a run at equal intervals.
type path struct {
	share     []float64 // of the contract
	throttled []float64 // requests a second
}

// follow samples the share and the throttled requests until ctx ends.
func follow(ctx context.Context, pool *pgxpool.Pool, u *upstream) (p path, err error) {
	ticker := time.NewTicker(sampleEvery)
	defer ticker.Stop()
	var before int64
	for {
		select {
		case <-ctx.Done():
			return p, nil
		case <-ticker.C:
		}
		share := 1.0
		err := pool.QueryRow(ctx, `SELECT share FROM ratelimit.prices`).Scan(&share)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) && ctx.Err() == nil {
			return p, err
		}
		_, throttled := u.counts()
		p.share = append(p.share, share)
		p.throttled = append(p.throttled, float64(throttled-before)/sampleEvery.Seconds())
		before = throttled
	}
}
