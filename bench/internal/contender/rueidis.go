//go:build rueidis

package contender

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"strconv"

	"github.com/redis/rueidis"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

// Rueidis is redis_rate's script through rueidis, which pipelines concurrent commands by itself.
type Rueidis struct {
	Keys int
}

// Open connects to the scenario's Redis and empties it.
func (w Rueidis) Open(ctx context.Context, b Bench) (*Runner, error) {
	return open(b, func(r *Runner) error {
		script, err := redisScript(ctx)
		if err != nil {
			return err
		}
		observer, err := r.redis(ctx, server.Nothing, w.Keys, 1)
		if err != nil {
			return err
		}
		client, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress:  []string{observer.Options().Addr},
			DisableCache: true, // scripts cannot use the client-side cache
			DialCtxFn: func(ctx context.Context, address string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
				return r.wire.Dial(ctx, "tcp", address)
			},
		})
		if err != nil {
			return err
		}
		r.closers = append(r.closers, func() error { client.Close(); return nil })
		all, limit := makeKeys(w.Keys), redisLimit(w.Keys)
		arguments := []string{strconv.Itoa(limit.Burst), strconv.Itoa(limit.Rate), fmt.Sprint(limit.Period.Seconds()), "1"}
		lua := rueidis.NewLuaScript(script)
		r.call = func(ctx context.Context, c *load.Caller) error {
			return admitted(lua.Exec(ctx, client, []string{redisKey(b.Name, all.any(c))}, arguments))
		}
		return nil
	})
}

// admitted parses an answer as redis_rate does, and returns an error if it is a refusal.
func admitted(answer rueidis.RedisResult) error {
	values, err := answer.ToArray()
	if err != nil {
		return err
	}
	const fields = 4
	if len(values) != fields {
		return fmt.Errorf("redis answered with %d values", len(values))
	}
	allowed, err := values[0].AsInt64()
	if err != nil {
		return err
	}
	for _, wait := range values[2:] { // RetryAfter and ResetAfter
		if _, err := wait.AsFloat64(); err != nil {
			return err
		}
	}
	if allowed != 1 {
		return errRedisRefused
	}
	return nil
}
