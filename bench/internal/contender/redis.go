package contender

import (
	"context"
	"errors"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
)

// RedisRate is redis_rate on a Redis that keeps nothing on disk.
type RedisRate struct {
	Keys int
}

// Open connects to the scenario's Redis and empties it.
func (w RedisRate) Open(ctx context.Context, b Bench) (Runner, error) {
	if b.Redis == nil {
		return nil, unavailable("no redis-server on the PATH")
	}
	wire := &load.Wire{}
	client := redis.NewClient(&redis.Options{
		Addr:            b.Redis.Address,
		Dialer:          wire.Dial,
		PoolSize:        connections(b.Callers, redisConnections),
		DisableIdentity: true,
		// A service of cloud vendors that costs every reply a look.
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	if err := client.FlushAll(ctx).Err(); err != nil {
		return nil, errors.Join(err, client.Close())
	}
	limiter, all := redis_rate.NewLimiter(client), makeKeys(w.Keys)
	limit := redis_rate.Limit{Rate: 1_000_000, Burst: 1_000_000_000, Period: time.Second}
	r := newRunner(b, func(ctx context.Context, c *load.Caller) error {
		answer, err := limiter.Allow(ctx, b.Name+all.any(c), limit)
		if err == nil && answer.Allowed != 1 {
			return errors.New("redis_rate refused a call that it has enough for")
		}
		return err
	})
	r.wire = wire
	r.close = client.Close
	return r, nil
}
