package processes_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// otherCode is another limit of the programs that use ruledCode.
var otherCode = ratelimit.Define("other", ratelimit.PerHour(8))

// served is what a program serves: the capacities of its two limits.
type served struct {
	what       string
	api, other float64
}

var (
	servedCode    = served{"the definitions in the code", 7, 8}
	servedBefore  = served{"what was loaded", 50, 60}
	servedChanged = served{"the change", 500, 600}
	servedOthers  = served{"its last good version, and the change of others", 50, 600}
	servedHistory = served{"the last good version in the history, and the change of others", 50, 600}
)

// outage is a row of the table of what programs serve when something is wrong.
type outage struct {
	when string
	// running is what a program serves that had loaded the rules before, and starting what one serves that starts meanwhile.
	running, starting served
	// closed is whether decisions fail: with an error, and never with an admission.
	closed bool
	// told checks the RulesLoaded of the running and of the starting program; nil if they report nothing.
	told func(*ratelimit.RulesLoaded) bool
	// afterwards is what both serve once it is over.
	afterwards served

	config  rules.Config
	pooled  bool // whether the programs connect through a pooler in transaction mode
	begin   func(t *testing.T, o *outageStand)
	prepare func(starting *ruleUser)
	end     func(t *testing.T, o *outageStand)
}

func outages() []outage {
	away := func(e *ratelimit.RulesLoaded) bool { return e.Err != nil && e.Kept == 0 }
	return []outage{
		{
			when: "the database is away", running: servedBefore, starting: servedCode, closed: true, told: away,
			begin:   func(_ *testing.T, o *outageStand) { o.running.news.close(); o.running.decisions.close() },
			prepare: func(u *ruleUser) { u.news.close(); u.decisions.close() },
			end: func(t *testing.T, o *outageStand) {
				t.Helper()
				o.change(t, o.store)
				o.reconnect()
			}, afterwards: servedChanged,
		},
		{
			when: "the database goes away in the middle of each load", running: servedBefore, starting: servedCode, told: away,
			begin: func(t *testing.T, o *outageStand) {
				t.Helper()
				o.running.cutLoads()
				o.change(t, o.store)
			},
			prepare: (*ruleUser).cutLoads,
			end:     func(_ *testing.T, o *outageStand) { o.reconnect() }, afterwards: servedChanged,
		},
		{
			when: "the row of a rule says what cannot be", running: servedOthers, starting: servedHistory,
			told:  func(e *ratelimit.RulesLoaded) bool { return e.Err != nil && e.Kept == 1 },
			begin: breakRule, end: func(t *testing.T, o *outageStand) { t.Helper(); o.change(t, o.store) }, afterwards: servedChanged,
		},
		{
			when: "a change is made in a transaction that is open", running: servedBefore, starting: servedBefore, begin: changeInTx,
			end:        func(t *testing.T, o *outageStand) { t.Helper(); require.NoError(t, o.tx.Commit(t.Context())) },
			afterwards: servedChanged,
		},
		{
			when: "a change is made in a transaction that is rolled back", running: servedBefore, starting: servedBefore, begin: changeInTx,
			end:        func(t *testing.T, o *outageStand) { t.Helper(); require.NoError(t, o.tx.Rollback(t.Context())) },
			afterwards: servedBefore,
		},
		{
			when: "a pooler in transaction mode is in between, and NoListen is set", running: servedChanged, starting: servedChanged,
			pooled: true, config: rules.Config{NoListen: true}, begin: func(t *testing.T, o *outageStand) { t.Helper(); o.change(t, o.store) },
			end: func(*testing.T, *outageStand) {}, afterwards: servedChanged,
		},
		{
			when: "a pooler in transaction mode is in between, and NoListen is not set", running: servedChanged, starting: servedChanged,
			pooled: true, begin: func(t *testing.T, o *outageStand) { t.Helper(); o.change(t, o.store) },
			end: func(*testing.T, *outageStand) {}, afterwards: servedChanged,
		},
	}
}

// outageStand is a database with a rule for each limit, and two programs on it.
type outageStand struct {
	*world.World

	store             *rules.Store
	running, starting *ruleUser
	tx                pgx.Tx
}

func TestWhatIsServedWhenSomethingIsWrong(t *testing.T) {
	t.Parallel()
	for _, row := range outages() {
		t.Run(row.when, func(t *testing.T) {
			t.Parallel()
			o := &outageStand{World: world.New(t)}
			o.store = newStore(t, o.World, -1)
			first, err := o.store.Put(t.Context(), edit, hourly("api", 50), hourly("other", 60))
			require.NoError(t, err)
			url := o.URL()
			if row.pooled {
				url = startPooler(t, url)
			}
			row.config.Poll = 100 * time.Millisecond
			o.running = startRuleUser(t, url, row.config)
			o.running.knows(t, first.Version)
			o.running.serves(t, servedBefore)

			row.begin(t, o)
			var prepare []func(*ruleUser)
			if row.prepare != nil {
				prepare = append(prepare, row.prepare)
			}
			o.starting = startRuleUser(t, url, row.config, prepare...)
			for u, serves := range map[*ruleUser]served{o.running: row.running, o.starting: row.starting} {
				if row.told != nil {
					world.Eventually(t, "it is told", func() bool { _, told := u.told.find(row.told); return told })
				} else {
					u.looksAgain(t)
				}
				u.serves(t, serves)
				u.decides(t, serves, row.closed)
			}
			row.end(t, o)
			for _, u := range []*ruleUser{o.running, o.starting} {
				u.looksAgain(t)
				u.serves(t, row.afterwards)
				u.decides(t, row.afterwards, false)
			}
		})
	}
}

// hourly is a rule of n tokens an hour.
func hourly(limit string, n float64) rules.Rule {
	return rules.Rule{Limit: limit, Policy: ratelimit.TokenBucket{Rate: n, Period: time.Hour}}
}

// change makes the change.
func (o *outageStand) change(t *testing.T, store *rules.Store) {
	t.Helper()
	_, err := store.Put(t.Context(), edit, hourly("api", 500), hourly("other", 600))
	require.NoError(t, err)
}

// changeInTx makes the change in a transaction that stays open.
func changeInTx(t *testing.T, o *outageStand) {
	t.Helper()
	o.tx = o.Begin(t, pgx.ReadCommitted)
	o.change(t, o.store.WithTx(o.tx))
}

// breakRule makes a rule by hand what no rule can be, and changes the other.
func breakRule(t *testing.T, o *outageStand) {
	t.Helper()
	o.Exec(t, `INSERT INTO ratelimit.rules (version, position, of, name, says, author, reason)
		SELECT version, 99, 'rule', 'api', '{"rate": -1, "period": "1h"}', 'ana', 'by hand' FROM ratelimit.rules_version`)
	_, err := o.store.Put(t.Context(), edit, hourly("other", 600))
	require.NoError(t, err)
}

// reconnect lets the programs through to the database again.
func (o *outageStand) reconnect() {
	for _, u := range []*ruleUser{o.running, o.starting} {
		u.news.breakAt("")
		u.news.open()
		u.decisions.open()
	}
}

// cutLoads breaks each connection in the middle of a load, once the answer is on its way.
func (u *ruleUser) cutLoads() {
	u.news.breakAt("row_number()")
	u.news.close() // programs that have loaded before send another message
	u.news.open()
}

// looksAgain waits until the Set has known after now what the tables say.
func (u *ruleUser) looksAgain(t *testing.T) {
	t.Helper()
	now := time.Now()
	world.Eventually(t, "the Set looks at the tables", func() bool { return u.set.Age() < time.Since(now) })
}

// serves waits until the program serves the expected rules. A change holds from an instant of the database's clock, which may be a
// little ahead of this machine's.
func (u *ruleUser) serves(t *testing.T, what served) {
	t.Helper()
	capacity := func(l ratelimit.Limit) float64 { return u.limiter.Resolve(l.For("ada")).Capacity() }
	world.Eventually(t, "it serves "+what.what, func() bool { return capacity(ruledCode) == what.api && capacity(otherCode) == what.other })
}

// decides checks that decisions follow the served rules, or fail if closed.
func (u *ruleUser) decides(t *testing.T, by served, closed bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), world.Patient)
	defer cancel()
	d, err := u.limiter.Take(ctx, ruledCode.For("ada").Cost(0.5), otherCode.For("ada").Cost(0.5))
	if closed {
		require.Error(t, err)
		require.False(t, d.Allowed)
		return
	}
	require.NoError(t, err)
	require.True(t, d.Allowed)
	require.Equal(t, []float64{by.api, by.other}, []float64{d.States[0].Limit.Capacity(), d.States[1].Limit.Capacity()})
}
