package integration_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// gate is what connections to the server go through. It can be shut: those there are break, and nobody gets another.
type gate struct {
	mu    sync.Mutex
	shut  bool
	conns []net.Conn
}

var errShut = errors.New("the gate is shut")

// on is for a pool's configuration.
func (g *gate) on(config *pgxpool.Config) {
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.shut {
			return nil, errShut
		}
		conn, err := dial(ctx, network, address)
		if err == nil {
			g.conns = append(g.conns, conn)
		}
		return conn, err
	}
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = true
	for _, conn := range g.conns {
		_ = conn.Close()
	}
	g.conns = nil
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = false
}

// ruleUser is what a program has that decides by stored rules: a Set that runs, and a Limiter. Each has connections of its
// own, which tests break.
type ruleUser struct {
	set       *rules.Set
	limiter   *ratelimit.Limiter
	news      gate // that the Set's connections go through
	decisions gate // that the Limiter's go through
	loads     cutter
	told      loadsTold
}

// loadsTold remembers what a Set has told of its loads.
type loadsTold struct {
	mu   sync.Mutex
	told []ratelimit.RulesLoaded
}

func (o *loadsTold) Observe(_ context.Context, event ratelimit.Event) {
	if loaded, ok := event.(ratelimit.RulesLoaded); ok {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.told = append(o.told, loaded)
	}
}

// find returns the first that is as asked for.
func (o *loadsTold) find(is func(*ratelimit.RulesLoaded) bool) (ratelimit.RulesLoaded, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for i := range o.told {
		if is(&o.told[i]) {
			return o.told[i], true
		}
	}
	return ratelimit.RulesLoaded{}, false
}

// startRuleUser starts a program on a database. Prepare may shut its gates before.
func startRuleUser(t *testing.T, url string, config rules.Config, prepare ...func(*ruleUser)) *ruleUser {
	t.Helper()
	u := &ruleUser{}
	for _, p := range prepare {
		p(u)
	}
	config.Observer = &u.told
	var err error
	u.set, err = rules.NewSet(openThrough(t, url, u.news.on, u.loads.on), config)
	require.NoError(t, err)
	b := &bundle{pool: openThrough(t, url, u.decisions.on), schema: "ratelimit"}
	u.limiter = b.with(t, ratelimit.Config{Policies: u.set})
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- u.set.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.ErrorIs(t, <-ended, context.Canceled)
	})
	return u
}

func openThrough(t *testing.T, url string, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	config.MaxConns = 4
	for _, c := range configure {
		c(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// knows waits until the program has loaded a version.
func (u *ruleUser) knows(t *testing.T, version int64) {
	t.Helper()
	eventually(t, "the rules are loaded", func() bool { return u.set.Version() >= version })
}

// takeUntil takes a token after the other until an instant of the database's clock, and returns the decisions.
func (u *ruleUser) takeUntil(t *testing.T, key string, until time.Time) (decisions []taken) {
	t.Helper()
	for {
		d := u.take(t, key, 1)
		decisions = append(decisions, d)
		if d.at >= until.UnixMicro() {
			return decisions
		}
	}
}

func (u *ruleUser) take(t *testing.T, key string, cost float64) taken {
	t.Helper()
	version := u.set.Version()
	d, err := u.limiter.Take(t.Context(), ruledCode.For(key).Cost(cost))
	require.NoError(t, err)
	return taken{key, d.At.UnixMicro(), d.Allowed, cost, version, d.States[0].Limit.Policy().String()}
}

// A program whose connections for news break while a change is made goes on by the policy before. It tells for how long,
// and until then admits no more than that policy gives in that time. Then it is right.
func TestAProcessThatHearsLate(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "a process is late by seconds")
	for name, rates := range map[string][2]float64{"OfLess": {100, 10}, "OfMore": {10, 1000}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before, after := per5s(rates[0]), per5s(rates[1])
			b := setup(t)
			first, err := b.newStore(t, -1).Put(t.Context(), edit, before)
			require.NoError(t, err)
			url := b.pool.Config().ConnString()
			late, prompt := startRuleUser(t, url, rules.Config{Poll: time.Second}), startRuleUser(t, url, rules.Config{})
			late.knows(t, first.Version)
			prompt.knows(t, first.Version)
			full := late.take(t, "ada", 1)

			late.news.close()
			second, err := b.newStore(t, 500*time.Millisecond).Put(t.Context(), edit, after)
			require.NoError(t, err)
			prompt.knows(t, second.Version)
			decisions := append(prompt.takeUntil(t, "ada", second.From), full)
			decisions = append(decisions, takeTogether(t, second.From.Add(2*time.Second), late, prompt)...)
			require.Equal(t, first.Version, late.set.Version())

			late.news.open()
			late.knows(t, second.Version)
			told, _ := late.told.find(func(e *ratelimit.RulesLoaded) bool { return e.Err == nil && e.Version == second.Version })
			require.Greater(t, told.Late, 2*time.Second)
			right := takeTogether(t, second.From.Add(told.Late+time.Second), late, prompt)

			l := law{{name: "before", from: full.at, version: first.Version, rule: before}, fromRule("after", after, second)}
			require.Positive(t, l.lateIn(t, "ada", decisions)[1].decisions)
			require.Empty(t, l.lateIn(t, "ada", right))
			l.requireKept(t, append(decisions, right...), b.row(t, "api", "ada"), rates[0])
			admitted := 0.0
			for _, d := range right {
				if d.allowed {
					admitted += d.cost
				}
			}
			require.LessOrEqual(t, admitted, l[1].capacity()+l[1].arrived(second.From.UnixMicro()+2e6, b.row(t, "api", "ada").TS))
		})
	}
}

// takeTogether has programs take from one key at the same time, until an instant of the database's clock.
func takeTogether(t *testing.T, until time.Time, users ...*ruleUser) (decisions []taken) {
	t.Helper()
	var taking sync.WaitGroup
	took := make([][]taken, len(users))
	for i, u := range users {
		taking.Go(func() { took[i] = u.takeUntil(t, "ada", until) })
	}
	taking.Wait()
	return slices.Concat(took...)
}
