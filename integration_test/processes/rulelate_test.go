package processes_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// gate is a proxy for connections to the server. Shutting it breaks its connections and rejects new ones.
type gate struct {
	mu    sync.Mutex
	shut  bool
	words string // a request that holds them is carried out, and its connection breaks before the answer; "": none
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
		return &gateConn{Conn: conn, gate: g}, err
	}
}

// breakAt makes connections break at requests that hold the words. None breaks at "".
func (g *gate) breakAt(words string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.words = words
}

func (g *gate) breaksAt(request []byte) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.words != "" && bytes.Contains(request, []byte(g.words))
}

// gateConn is a connection through a gate.
type gateConn struct {
	net.Conn
	gate *gate
	lose atomic.Bool // the next answer
}

func (c *gateConn) Write(request []byte) (int, error) {
	if c.gate.breaksAt(request) {
		c.lose.Store(true)
	}
	return c.Conn.Write(request)
}

func (c *gateConn) Read(answer []byte) (int, error) {
	n, err := c.Conn.Read(answer)
	if err == nil && c.lose.Load() {
		return 0, errors.Join(syscall.ECONNRESET, c.Close())
	}
	return n, err
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
	u.set, err = rules.NewSet(world.Open(t, url, u.news.on).Pool, config)
	require.NoError(t, err)
	u.limiter = world.Open(t, url, u.decisions.on).With(t, ratelimit.Config{Policies: u.set})
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- u.set.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.ErrorIs(t, <-ended, context.Canceled)
	})
	return u
}

// knows waits until the program has loaded a version.
func (u *ruleUser) knows(t *testing.T, version int64) {
	t.Helper()
	world.Eventually(t, "the rules are loaded", func() bool { return u.set.Version() >= version })
}

func (u *ruleUser) take(t *testing.T, key string, cost float64) taken {
	t.Helper()
	version := u.set.Version()
	d, err := u.limiter.Take(t.Context(), ruledCode.For(key).Cost(cost))
	require.NoError(t, err)
	return taken{key, d.At.UnixMicro(), d.Allowed, cost, version, d.States[0].Limit.Policy().String()}
}
