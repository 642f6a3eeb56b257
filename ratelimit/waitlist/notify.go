package waitlist

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

const (
	channel = "ratelimit_slots"
	// tellTimeout bounds a notification. A process that misses it finds the slot by Config.Poll.
	tellTimeout = time.Second
	// reconnectPause is how long Run waits before it listens again.
	reconnectPause = time.Second
	// listenTimeout bounds how long Run waits for a connection of the pool, and for the server to listen, before it
	// reports that it does not listen.
	listenTimeout = 5 * time.Second
)

// payload names a bucket in notifications, which every role of the database can hear, without telling its key.
func (s *List) payload(key string) string {
	sum := sha256.Sum256([]byte(s.limit.Name() + "\x00" + key))
	return base64.RawURLEncoding.EncodeToString(sum[:12])
}

// released wakes the first callers that wait for the key, in this process and in others.
func (s *List) released(ctx context.Context, key string) {
	s.signal(key)
	s.tell(ctx, key)
}

// signal wakes the first caller of this process.
func (s *List) signal(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if q := s.queues[key]; q != nil {
		q.signal()
	}
}

// tell notifies the other processes that the line for a key has moved, or that a slot of it is free, if one of them
// waits.
func (s *List) tell(ctx context.Context, key string) {
	if s.config.Pool == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tellTimeout)
	defer cancel()
	value, err := s.limiter.Value(ctx, s.line.ForStoredKey(key))
	if err == nil && len(value.Leases()) > 0 {
		_, _ = s.config.Pool.Exec(ctx, `SELECT pg_notify($1, $2)`, channel, s.payload(key))
	}
}

// Run listens for slots that other processes release, until ctx ends; call it in a goroutine of its own. It uses one
// connection besides the pool's, and reconnects if it's lost, which the Limiter's Observer receives as an
// [event.Failed] with the Verb "listen". It returns nil when ctx has ended, or an error that wraps ErrInvalidConfig.
func (s *List) Run(ctx context.Context) error {
	if s.config.Pool == nil {
		return fmt.Errorf("%w: run: field Pool is nil; set it, or do not call Run: waiting callers find free slots by Poll",
			ErrInvalidConfig)
	}
	if err := arg.CheckContext(ctx, "run"); err != nil {
		return fmt.Errorf("waitlist: %w: %w", ratelimit.ErrInvalidRequest, err)
	}
	for {
		began := time.Now()
		if err := s.listen(ctx); ctx.Err() == nil {
			err = fmt.Errorf("waitlist: listen for %q: %w", s.limit.Name(), err)
			s.limiter.Observe(ctx, event.Failed{Verb: "listen", Limit: s.limit.Name(), Err: err, Began: began})
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(reconnectPause):
		}
	}
}

// listen wakes callers of this process by notifications, until the connection fails.
func (s *List) listen(ctx context.Context) error {
	began, cancel := context.WithTimeout(ctx, listenTimeout)
	defer cancel()
	acquired, err := s.config.Pool.Acquire(began)
	if err != nil {
		return fmt.Errorf("get a connection of the pool: %w", err)
	}
	conn := acquired.Hijack()
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	if _, err := conn.Exec(began, "LISTEN "+channel); err != nil {
		return err
	}
	s.wakeAll("") // earlier notifications are lost
	for {
		notification, err := conn.WaitForNotification(ctx)
		if err != nil {
			return err
		}
		s.wakeAll(notification.Payload)
	}
}

// wakeAll wakes the first caller for the bucket of a notification, or the first callers for all buckets if the payload
// is empty.
func (s *List) wakeAll(payload string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, q := range s.queues {
		if payload == "" || s.payload(key) == payload {
			q.signal()
		}
	}
}
