package integration_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// cutCrowd are calls that are made at once, on a database that was prepared for them.
type cutCrowd struct {
	waiters int // how many connections may wait for a held row; there is one more, for the calls that need none
	prepare func(t *testing.T, s *stand, key string) (release func())
	calls   func(key string) []cutCall
}

// cutCall is a call of a crowd. The answers of all calls for one bucket must fit the tokens taken from it.
type cutCall struct {
	wants   []want // all of them or none
	call    func(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) (ratelimit.Decision, error)
	commits bool // whether an error but ErrCommitUnknown says that nothing was taken
	waits   bool // for a row that is held
}

// want is the cost of a call for a bucket.
type want struct {
	limit ratelimit.Limit
	key   string
	cost  float64
}

func (w want) bucket() string { return w.limit.Name() + " " + w.key }

func cutTake(wants ...want) cutCall {
	return cutCall{wants: wants, call: func(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) (ratelimit.Decision, error) {
		return limiter.Take(ctx, requests...)
	}}
}

func cutReserve(wants ...want) cutCall {
	return cutCall{wants: wants, commits: true, call: func(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) (ratelimit.Decision, error) {
		r, err := limiter.Reserve(ctx, requests...)
		return r.Decision, err
	}}
}

// cutTakeUpTo takes four times its cost, because the bucket has enough.
func cutTakeUpTo(of want) cutCall {
	return cutCall{wants: []want{{of.limit, of.key, 4 * of.cost}}, commits: true, call: func(ctx context.Context, limiter *ratelimit.Limiter, _ []ratelimit.Request) (ratelimit.Decision, error) {
		_, d, err := limiter.TakeUpTo(ctx, 4, of.limit.For(of.key).Cost(of.cost))
		return d, err
	}}
}

func (c *cutCall) requests() []ratelimit.Request {
	all := make([]ratelimit.Request, len(c.wants))
	for i, w := range c.wants {
		all[i] = w.limit.For(w.key).Cost(w.cost)
	}
	return all
}

func cutWait(wants ...want) cutCall {
	c := cutTake(wants...)
	c.waits = true
	return c
}

// scarce has three tokens for four who want one.
var scarce = ratelimit.Define("scarce", hoard(3))

// sliced is a sliding window that gains nothing while a test runs.
var sliced = ratelimit.Define("sliced", ratelimit.SlidingWindow{Rate: callsCapacity, Period: ratelimit.Day, Slices: 24})

var cutCrowds = map[string]cutCrowd{
	"AHeldRow": {
		waiters: 1,
		prepare: func(t *testing.T, s *stand, key string) func() {
			t.Helper()
			s.outside.exec(t, `INSERT INTO ratelimit.buckets (name, key, shard, value, ts) VALUES ('calls', $1, 0, 1000, 0)`, key+"held")
			return s.outside.holdRow(t, "calls", key+"held")
		},
		calls: func(key string) []cutCall {
			return []cutCall{
				cutTake(want{calls, key + "0", 1}), cutTake(want{calls, key + "1", 1}), cutTake(want{calls, key + "2", 1}),
				cutWait(want{calls, key + "held", 1}), cutTake(want{calls, key + "3", 1}),
				cutWait(want{calls, key + "held", 2}, want{roomy, key, 1}),
			}
		},
	},
	"EachKind": {
		calls: func(key string) []cutCall {
			return []cutCall{
				cutTake(want{calls, key + "0", 1}), cutTake(want{calls, key + "1", 1}),
				cutTake(want{calls, key + "2", 1}, want{roomy, key + "2", 3}), cutTake(want{sliced, key, 1}), cutTake(want{sliced, key + "0", 1}),
				cutTake(want{sliced, key + "1", 1}),
				cutTake(want{shardedCalls, key, 1}), cutTake(want{calls, key + "3", 1}), cutReserve(want{calls, key + "r", 2}, want{roomy, key + "r", 1}),
				cutTake(want{scarce, key, 2}), cutTake(want{scarce, key, 2}),
				cutTake(want{roomy, key + "4", 1}, want{calls, key + "4", 1}, want{other, key, 1}), cutTakeUpTo(want{roomy, key + "5", 1}),
			}
		},
	},
}

func (c cutCrowd) connections() int32 { return int32(c.waiters) + 1 }

// cutStatements are files of statements, of which each is broken in each way. Between them they are all that batches send.
var cutStatements = []string{
	"bucket_take_alone", "buckets_spend", "clusters_spend", "buckets_read",
	"begin", "buckets_lock_free", "buckets_save", "reservation_save", "commit",
}

// Wherever the connection of a batch breaks, each of its callers gets an error or an answer. An answer is true. A call with an
// error has taken all of its cost or nothing. The next batch works.
func TestABatchWhoseConnectionBreaksAnywhere(t *testing.T) {
	t.Parallel()
	for name, side := range map[string]cut{
		"BeforeTheRequest": cutRequest, "InTheRequest": cutHalfRequest, "BeforeTheAnswer": cutUnanswered,
		"AtTheAnswer": cutAnswer, "InTheAnswer": cutHalfAnswer, "BehindTheAnswer": cutAnswered,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var mu sync.Mutex
			cut, requests := map[string]bool{}, 0
			missing := func() []string {
				mu.Lock()
				defer mu.Unlock()
				return slices.DeleteFunc(slices.Clone(cutStatements), func(file string) bool { return cut[file] })
			}
			t.Cleanup(func() {
				t.Logf("%d requests were cut: %s", requests, strings.Join(slices.Sorted(maps.Keys(cut)), ", "))
				require.True(t, len(missing()) == 0 || testing.Short() || generalPath || t.Failed(), "no request was cut with one of %s", missing())
			})
			for crowd, made := range cutCrowds {
				t.Run(crowd, func(t *testing.T) {
					t.Parallel()
					representative(t, crowd, "EachKind")
					// On a busy machine calls come late, and go alone in place of in batches. The crowd that sends all statements tries again.
					for try := 0; try == 0 || crowd == "EachKind" && try < 10 && !testing.Short() && !generalPath && len(missing()) > 0; try++ {
						broken := cutEverywhere(t, made, side)
						mu.Lock()
						requests += len(broken)
						maps.Copy(cut, cutFiles(t, broken))
						mu.Unlock()
					}
				})
			}
		})
	}
}

// cutEverywhere breaks the connection of a crowd at each request that it sends, and returns the statements of each.
func cutEverywhere(t *testing.T, crowd cutCrowd, side cut) [][]string {
	t.Helper()
	cutter := &cutter{}
	s := newStand(t, cutter.on, func(c *pgxpool.Config) { c.MaxConns = crowd.connections() })
	require.NoError(t, s.outside.limiter.Credit(t.Context(), calls.For("first"))) // stores the fingerprint
	for n := 1; s.cutAt(t, cutter, crowd, n, side); n++ {
		require.Less(t, n, 100, "more requests than calls could send")
	}
	s.requireHealthy(t)
	eventually(t, "the sessions of broken connections end", func() bool {
		return s.outside.count(t, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND backend_type = 'client backend' AND application_name <> 'outside'`) <= int(crowd.connections())
	})
	return cutter.broken
}

// cutAt breaks the connection of a crowd at the n-th request that it sends, and reports whether it sent so many.
func (s *stand) cutAt(t *testing.T, cutter *cutter, crowd cutCrowd, n int, side cut) (reached bool) {
	t.Helper()
	key, release := fmt.Sprint(n, " "), func() {}
	if crowd.prepare != nil {
		release = crowd.prepare(t, s, key)
	}
	made := crowd.calls(key)
	conns := make([]*pgxpool.Conn, crowd.connections()) // all of them, so that all calls are there before the first is sent
	backends := map[string]uint32{}
	for i := range conns {
		conn, err := s.pool.Acquire(t.Context())
		require.NoError(t, err)
		conns[i] = conn
		of := conn.Conn().PgConn()
		backends[of.Conn().LocalAddr().String()] = of.PID()
	}
	askers := make([]*asker, len(made))
	for i, m := range made {
		askers[i] = startAsking(t, func(ctx context.Context) (ratelimit.Decision, error) { return m.call(ctx, s.limiter, m.requests()) })
		if i == 0 {
			askers[0].awaitUnderway() // it goes alone; the others come together, before a busy machine takes its batch for slow
		}
	}
	for _, a := range askers {
		a.awaitUnderway()
	}
	cutter.armAt(n, side, nil)
	for _, conn := range conns {
		conn.Release()
	}
	waiting := func() (left int) {
		for i, a := range askers {
			if !a.hasEnded() && !made[i].waits {
				left++
			}
		}
		return left
	}
	eventually(t, "each call that needs no held row has its answer", func() bool { return waiting() == 0 })
	release()
	for _, a := range askers {
		eventually(t, "each call has its answer", a.hasEnded)
	}
	if reached = cutter.seen() >= n; reached {
		pid, wasThere := backends[cutter.brokenFrom()]
		require.True(t, wasThere)
		s.awaitEnd(t, pid) // by then the server has run the statement
	}
	cutter.arm("", 0, 0)
	s.requireTrue(t, made, askers)
	if !reached {
		for i, a := range askers {
			require.NoError(t, a.err, "call %d", i)
		}
		return false
	}
	_, _ = s.limiter.Take(t.Context(), calls.For(key+"after")) // finds out that the connection is broken
	takeOne(t, s.limiter, calls.For(key+"after"))
	if len(conns) > 1 {
		s.pool.Reset() // the calls may have been on another connection
	}
	return true
}

// requireTrue checks the answers against the rows. The tokens taken are the costs of some of the calls, each as a whole: of all
// allowed calls, and of no call whose answer says that it took nothing.
func (s *stand) requireTrue(t *testing.T, made []cutCall, askers []*asker) {
	t.Helper()
	taken := s.takenOf(t)
	left := maps.Clone(taken)
	var unknown []cutCall
	for i, m := range made {
		a := askers[i]
		require.False(t, a.err != nil && a.d.Allowed, "an error carries no admission")
		switch {
		case a.err == nil && a.d.Allowed:
			m.takeFrom(left, 1)
		case a.err == nil:
			for _, w := range m.wants {
				require.Greater(t, taken[w.bucket()]+w.cost, w.limit.Capacity(), "%s was refused while there was enough", w.bucket())
			}
		case !m.commits, errors.Is(a.err, ratelimit.ErrCommitUnknown):
			unknown = append(unknown, m)
		}
	}
	buckets := map[string]bool{}
	for _, m := range made {
		for _, w := range m.wants {
			buckets[w.bucket()] = true
		}
	}
	maps.DeleteFunc(left, func(bucket string, _ float64) bool { return !buckets[bucket] })
	require.True(t, areTaken(unknown, left), "beyond what was allowed these were taken: %v; these may be: %v", left, unknown)
	require.Equal(t, s.outside.count(t, `SELECT count(*) FROM ratelimit.reservations`),
		s.outside.count(t, `SELECT count(*) FROM ratelimit.buckets WHERE name = 'roomy' AND key LIKE '%r' AND value < 1e6 - 0.5`), "reservations and what they took")
}

// takeFrom subtracts the costs of the call, times times.
func (c *cutCall) takeFrom(taken map[string]float64, times float64) {
	for _, w := range c.wants {
		taken[w.bucket()] -= times * w.cost
	}
}

// areTaken reports whether the costs of some of the calls add up to exactly taken.
func areTaken(calls []cutCall, taken map[string]float64) bool {
	if len(calls) == 0 {
		return !slices.ContainsFunc(slices.Collect(maps.Values(taken)), func(n float64) bool { return n != 0 })
	}
	c := calls[0]
	if areTaken(calls[1:], taken) {
		return true
	}
	c.takeFrom(taken, 1)
	defer c.takeFrom(taken, -1)
	return areTaken(calls[1:], taken)
}

// takenOf returns how many tokens were taken from each bucket of the limits of crowds.
func (s *stand) takenOf(t *testing.T) map[string]float64 {
	t.Helper()
	taken := map[string]float64{}
	for _, limit := range []ratelimit.Limit{calls, shardedCalls, roomy, other, scarce, sliced} {
		shards := 1
		if limit == shardedCalls {
			shards = shardsOf(limit)
		}
		for _, r := range s.outside.rows(t, "") {
			if r.Name == limit.Name() {
				taken[r.Name+" "+r.Key] += limit.Capacity()/float64(shards) - r.Value // of a row it may be a part of a token
			}
		}
	}
	for bucket, n := range taken {
		taken[bucket] = math.Round(n) // without the fraction that arrived meanwhile
	}
	return taken
}

// cutFiles returns the names of the files whose statements were in requests that were cut, and "begin" and "commit".
func cutFiles(t *testing.T, broken [][]string) map[string]bool {
	t.Helper()
	plain, of := strings.NewReplacer(`"`, "", "/* durability */", ""), map[string]string{}
	for _, file := range statementFiles(t) {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		of[plain.Replace(string(text))] = strings.TrimSuffix(filepath.Base(file), ".sql")
	}
	cut := map[string]bool{}
	for _, request := range broken {
		for _, sql := range request {
			word, _, _ := strings.Cut(sql, " ")
			name := of[plain.Replace(sql)]
			if name == "" {
				name = word
			}
			cut[name] = true
		}
	}
	return cut
}
