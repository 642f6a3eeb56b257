package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/examples/internal/demo"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const wrongPassword = "123456"

// patience is how long a request may take in the play, where a busy machine, on which 40 passwords take long to check,
// is no reason to refuse.
const patience = 10 * time.Minute

// clock is what the demo's limits take for the database's clock, so that half an hour passes in no time.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// stage is a running server and what the play needs to see of it.
type stage struct {
	url    string
	client *http.Client
	clock  *clock
	auth   *authenticator
	pool   *pgxpool.Pool
	start  time.Time

	mu        sync.Mutex
	refusedBy map[string]int // refusals of the act by the limits that refused
}

// attack serves on a free port of this machine, plays every act against that, and returns an error when
// one does not end as it should.
func attack(ctx context.Context, w io.Writer, pool *pgxpool.Pool, cost hashCost) error {
	begun := time.Now()
	st, err := newStage(ctx, pool, cost)
	if err != nil {
		return err
	}
	server := newServer(st.auth, slog.New(slog.DiscardHandler))
	server.patience = patience
	err = demo.During(ctx, server.httpServer(), server.shutdownTimeout(), func(url string) error {
		defer st.client.CloseIdleConnections()
		st.url = url
		return st.play(ctx, w)
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "\nEverything was admitted and refused as it should be: %d password hashes, %.1f seconds.\n",
		st.auth.hasher.computed.Load(), time.Since(begun).Seconds())
	return nil
}

// newStage returns a stage with the people registered, and nobody listening yet.
func newStage(ctx context.Context, pool *pgxpool.Pool, cost hashCost) (*stage, error) {
	now := time.Now().Truncate(time.Second)
	st := &stage{
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 200}},
		clock:  &clock{now: now},
		start:  now,
		pool:   pool,
	}
	var err error
	if st.auth, err = newAuthenticator(pool, st.clock.Now, newHasher(cost, 0)); err != nil {
		return nil, err
	}
	st.auth.refused = st.noteRefusal
	return st, st.auth.register(ctx, people()...)
}

func (st *stage) noteRefusal(d ratelimit.Decision) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, state := range d.States {
		if !state.Allowed {
			st.refusedBy[state.Limit.Name()]++
		}
	}
}

// reply is what a client sees of a sign-in.
type reply struct {
	status     int
	retryAfter time.Duration
	body       string
}

// try signs in over HTTP.
func (st *stage) try(ctx context.Context, login, password string) (reply, error) {
	body, err := json.Marshal(credentials{login, password})
	if err != nil {
		return reply{}, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, st.url+"/login", bytes.NewReader(body))
	if err != nil {
		return reply{}, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := st.client.Do(request)
	if err != nil {
		return reply{}, err
	}
	answered, err := io.ReadAll(response.Body)
	if err := errors.Join(err, response.Body.Close()); err != nil {
		return reply{}, err
	}
	seconds, _ := strconv.Atoi(response.Header.Get("Retry-After")) // absent: 0
	return reply{response.StatusCode, time.Duration(seconds) * time.Second, string(answered)}, nil
}

// tries is a function that signs in n times, the i-th time as credentials says.
type tries func(ctx context.Context, n int, as func(i int) credentials) ([]reply, error)

// together signs in n times at once.
func (st *stage) together(ctx context.Context, n int, as func(i int) credentials) ([]reply, error) {
	replies, failures := make([]reply, n), make([]error, n)
	start := make(chan struct{})
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() {
			<-start
			c := as(i)
			replies[i], failures[i] = st.try(ctx, c.Login, c.Password)
		})
	}
	close(start)
	group.Wait()
	return replies, cmp.Or(failures...) // one says enough
}

// every returns a function that signs in n times, with a pause before each but the first.
func (st *stage) every(pause time.Duration) tries {
	return func(ctx context.Context, n int, as func(i int) credentials) ([]reply, error) {
		replies := make([]reply, n)
		for i := range n {
			if i > 0 {
				st.clock.Advance(pause)
			}
			c := as(i)
			var err error
			if replies[i], err = st.try(ctx, c.Login, c.Password); err != nil {
				return nil, err
			}
		}
		return replies, nil
	}
}
