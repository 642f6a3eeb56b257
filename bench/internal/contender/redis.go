package contender

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

// RedisRate is redis_rate through go-redis.
type RedisRate struct {
	Keys int
	// Pipelined sends concurrent calls in one pipeline. Otherwise each call uses its own connection.
	Pipelined  bool
	Durability server.Durability
}

// Open connects to the scenario's Redis and empties it.
func (w RedisRate) Open(ctx context.Context, b Bench) (*Runner, error) {
	return open(b, func(r *Runner) error {
		client, err := r.redis(ctx, w.Durability, w.Keys)
		if err != nil {
			return err
		}
		limiter := redis_rate.NewLimiter(client)
		if w.Pipelined {
			pipelines, err := client.AutoPipeline()
			if err != nil {
				return err
			}
			limiter = redis_rate.NewLimiter(pipelines)
		}
		all, limit := makeKeys(w.Keys), redisLimit(w.Keys)
		r.call = func(ctx context.Context, c *load.Caller) error {
			answer, err := limiter.Allow(ctx, b.Name+all.any(c), limit)
			if err == nil && answer.Allowed != 1 {
				return errRedisRefused
			}
			return err
		}
		if w.Durability == server.Logged {
			r.before = func(ctx context.Context) (func() error, error) {
				return func() error { return flushLog(ctx, client) }, nil
			}
		}
		return nil
	})
}

// redis empties the scenario's Redis, sets the check of n keys, and returns a client.
func (r *Runner) redis(ctx context.Context, d server.Durability, n int) (*redis.Client, error) {
	started := r.bench.Redis[d]
	if started == nil {
		return nil, fmt.Errorf("%w: no redis-server on the PATH", ErrUnavailable)
	}
	client := redis.NewClient(&redis.Options{
		Addr:            started.Address,
		Dialer:          r.wire.Dial,
		PoolSize:        min(r.bench.Callers, redisConnections),
		DisableIdentity: true,
		// It is for cloud services, and inspects every reply.
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	r.closers = append(r.closers, client.Close)
	of := newBuckets(r.bench, r.bench.Name, n)
	r.check = func(ctx context.Context, calls int) error {
		gone, err := goneFromRedis(ctx, client, of, time.Now())
		if err != nil {
			return err
		}
		return of.compare(float64(calls), gone)
	}
	return client, client.FlushAll(ctx).Err()
}

// flushLog makes the server flush its log now, so that it does not delay another contender.
func flushLog(ctx context.Context, client *redis.Client) error {
	return errors.Join(
		client.ConfigSet(ctx, "appendfsync", "always").Err(),
		client.Set(ctx, "flushed", 1, 0).Err(),
		client.ConfigSet(ctx, "appendfsync", "everysec").Err(),
	)
}

var errRedisRefused = errors.New("redis refused a call that it has enough for")

// redisLimit equals the limit of the other contenders.
func redisLimit(n int) redis_rate.Limit {
	policy := policyFor(n)
	return redis_rate.Limit{Rate: int(policy.Rate), Burst: int(policy.Capacity), Period: policy.Period}
}

// goneFromRedis returns the tokens that are missing at now from keys that were full. A key holds the time when it is
// full again, in seconds since 2017.
func goneFromRedis(ctx context.Context, client *redis.Client, of buckets, now time.Time) (float64, error) {
	const piece = 1000
	policy := policyFor(of.keys.n)
	interval := policy.Period.Seconds() / policy.Rate
	began := now.Sub(time.Date(2017, 1, 1, 0, 0, 0, 0, time.UTC)).Seconds()
	sum := 0.0
	for from := 0; from < of.keys.n; from += piece {
		var names []string
		for i := from; i < min(from+piece, of.keys.n); i++ {
			names = append(names, "rate:"+of.limit.Name()+of.keys.at(i)) // as redis_rate names them
		}
		values, err := client.MGet(ctx, names...).Result()
		if err != nil {
			return 0, fmt.Errorf("count the tokens that are gone: %w", err)
		}
		for _, value := range values {
			text, wasUsed := value.(string)
			if !wasUsed {
				continue
			}
			full, err := strconv.ParseFloat(text, 64)
			if err != nil {
				return 0, fmt.Errorf("count the tokens that are gone: %w", err)
			}
			sum += (full - began) / interval
		}
	}
	return sum, nil
}
