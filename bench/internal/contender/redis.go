package contender

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// RedisRate is redis_rate through go-redis.
type RedisRate struct {
	Keys int
	// Pipelined sends what callers ask at the same time in one pipeline, one after the other, as go-redis does it when
	// it is asked to. Otherwise each call has a connection to itself.
	Pipelined  bool
	Durability server.Durability
}

// Open connects to the scenario's Redis and empties it.
func (w RedisRate) Open(ctx context.Context, b Bench) (_ Runner, err error) {
	redisServer := b.Redis[w.Durability]
	if redisServer == nil {
		return nil, unavailable("no redis-server on the PATH")
	}
	wire := &load.Wire{}
	client := newRedis(redisServer, wire, connections(b.Callers, redisConnections))
	defer func() {
		if err != nil {
			err = errors.Join(err, client.Close())
		}
	}()
	if err := client.FlushAll(ctx).Err(); err != nil {
		return nil, err
	}
	limiter := redis_rate.NewLimiter(client)
	if w.Pipelined {
		pipelines, err := client.AutoPipeline()
		if err != nil {
			return nil, err
		}
		limiter = redis_rate.NewLimiter(pipelines)
	}
	all, limit := makeKeys(w.Keys), redisLimit(w.Keys)
	r := newRunner(b, func(ctx context.Context, c *load.Caller) error {
		answer, err := limiter.Allow(ctx, b.Name+all.any(c), limit)
		if err == nil && answer.Allowed != 1 {
			return errRedisRefused
		}
		return err
	})
	r.wire, r.close, r.check = wire, client.Close, checkRedis(client, b.Name, w.Keys)
	if w.Durability == server.Logged {
		r.before = func(ctx context.Context) (func() error, error) {
			return func() error { return flushLog(ctx, client) }, nil
		}
	}
	return r, nil
}

// flushLog has the server flush its log now, and not in the turn of another contender, which it would hold up.
func flushLog(ctx context.Context, client *redis.Client) error {
	return errors.Join(
		client.ConfigSet(ctx, "appendfsync", "always").Err(),
		client.Set(ctx, "flushed", 1, 0).Err(),
		client.ConfigSet(ctx, "appendfsync", "everysec").Err(),
	)
}

var errRedisRefused = errors.New("redis refused a call that it has enough for")

func newRedis(s *server.Redis, wire *load.Wire, connections int) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr:            s.Address,
		Dialer:          wire.Dial,
		PoolSize:        connections,
		DisableIdentity: true,
		// A service of cloud vendors that costs every reply a look.
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

// redisLimit is the limit that the others have.
func redisLimit(n int) redis_rate.Limit {
	policy := policyFor(n)
	return redis_rate.Limit{Rate: int(policy.Rate), Burst: int(policy.Capacity), Period: policy.Period}
}

// redisKey is the key under which redis_rate keeps one of ours.
func redisKey(name, key string) string { return "rate:" + name + key }

// checkRedis returns a check that compares what is gone from n keys with the calls that were answered.
func checkRedis(client *redis.Client, name string, n int) func(ctx context.Context, calls int) error {
	opened := time.Now()
	return func(ctx context.Context, calls int) error {
		limit := ratelimit.Define(name, policyFor(n))
		now := time.Now()
		gone, err := takenFromRedis(ctx, client, name, n, now)
		if err != nil {
			return err
		}
		return exact(limit, float64(calls), gone, float64(n)*arrived(limit, now.Sub(opened)))
	}
}

// takenFromRedis returns what is gone at now from n keys that were full in the beginning. A key holds the time at which it is
// full again, in seconds since 2017.
func takenFromRedis(ctx context.Context, client *redis.Client, name string, n int, now time.Time) (float64, error) {
	const piece = 1000
	all, policy := makeKeys(n), policyFor(n)
	interval := policy.Period.Seconds() / policy.Rate
	began := now.Sub(time.Date(2017, 1, 1, 0, 0, 0, 0, time.UTC)).Seconds()
	sum := 0.0
	for from := 0; from < n; from += piece {
		var names []string
		for i := from; i < min(from+piece, n); i++ {
			names = append(names, redisKey(name, all.at(i)))
		}
		values, err := client.MGet(ctx, names...).Result()
		if err != nil {
			return 0, fmt.Errorf("count what was taken: %w", err)
		}
		for _, value := range values {
			text, there := value.(string)
			if !there {
				continue // nobody asked for it
			}
			full, err := strconv.ParseFloat(text, 64)
			if err != nil {
				return 0, fmt.Errorf("count what was taken: %w", err)
			}
			sum += (full - began) / interval
		}
	}
	return sum, nil
}

// redisScript returns the script that redis_rate runs for a call, which it does not export: what it sends to a server
// that does not know the script yet.
func redisScript(ctx context.Context) (string, error) {
	var recorded recorder
	_, err := redis_rate.NewLimiter(&recorded).Allow(ctx, "key", redis_rate.PerSecond(1))
	if !strings.Contains(recorded.script, "KEYS[1]") {
		return "", fmt.Errorf("redis_rate has sent no script: %w", err)
	}
	return recorded.script, nil
}

// recorder is a Redis that knows no script and keeps what it is sent.
type recorder struct {
	redis.Cmdable

	script string
}

func (r *recorder) EvalSha(ctx context.Context, _ string, _ []string, _ ...any) *redis.Cmd {
	answer := redis.NewCmd(ctx)
	answer.SetErr(redis.ErrNoScript)
	return answer
}

func (r *recorder) Eval(ctx context.Context, script string, _ []string, _ ...any) *redis.Cmd {
	r.script = script
	answer := redis.NewCmd(ctx)
	answer.SetErr(errors.New("it was to be recorded only"))
	return answer
}
