package scenario

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	ours = "pgratelimit"
	raw  = "raw update, pgx"
)

const (
	manyKeys = 100_000
	fewKeys  = 20_000 // for scenarios with several limits
	hotKey   = 1
)

// All returns every scenario. A quick run has fewer keys.
func All(quick bool) []Scenario {
	var all []Scenario
	for _, scenarios := range [][]Scenario{
		standalone(), fiveLimits(), transactions(), hotTransactions(), verbs(), byHand(), inSQL(), manyRows(quick), worn(),
		curves(),
	} {
		all = append(all, scenarios...)
	}
	return all
}

// onRedis returns the contenders that keep n keys in Redis.
func onRedis(n int) []Contender {
	return []Contender{
		{"redis_rate", contender.RedisRate{Keys: n, Durability: server.Nothing}},
		{"redis_rate, pipelined", contender.RedisRate{Keys: n, Pipelined: true, Durability: server.Nothing}},
		{"pipelined, AOF everysec", contender.RedisRate{Keys: n, Pipelined: true, Durability: server.Logged}},
		{"pipelined, AOF always", contender.RedisRate{Keys: n, Pipelined: true, Durability: server.Flushed}},
	}
}

// take returns the scenario of a standalone Take of one of n keys.
func take(name string, n, callers int, compare Figure, others ...Contender) Scenario {
	keys := "100k keys"
	if n == hotKey {
		keys = "one hot key"
	}
	return Scenario{
		Name: name, Title: fmt.Sprintf("standalone Take, %s, callers: %d", keys, callers), Callers: callers,
		Compare: compare, Contenders: append([]Contender{{ours, contender.Take{Keys: n}}}, others...),
	}
}

func standalone() []Scenario {
	relaxed := Contender{
		"pgratelimit, relaxed commits",
		contender.Take{Keys: manyKeys, Config: ratelimit.Config{RelaxedCommit: true}},
	}
	update := Contender{raw, contender.Raw{Keys: manyKeys}}
	slow := take("disk-1", manyKeys, 1, P50, relaxed, update)
	slow.Title, slow.Disk = slow.Title+", a flush takes 2 ms longer", 2*time.Millisecond
	return []Scenario{
		take("take-1", manyKeys, 1, P50, relaxed, update),
		{
			Name: "relaxed-1", Title: "relaxed commits, 100k keys, callers: 1", Callers: 1, Compare: P50,
			Contenders: []Contender{relaxed, {"raw update, relaxed commits", contender.Raw{Keys: manyKeys, Relaxed: true}}},
		},
		slow,
		take("take-16", manyKeys, 16, Throughput, update),
		take("take-64", manyKeys, 64, Throughput, append([]Contender{relaxed}, onRedis(manyKeys)...)...),
		take("take-512", manyKeys, 512, Throughput, append([]Contender{relaxed}, onRedis(manyKeys)...)...),
		take("hot-512", hotKey, 512, Throughput, onRedis(hotKey)...),
	}
}

// fiveLimits measures a Take of five limits beside a Take of one.
func fiveLimits() []Scenario {
	return []Scenario{{
		Name: "five-16", Title: "five limits in one Take, 20k keys each, callers: 16", Callers: 16, Compare: P50,
		Contenders: []Contender{
			{"five limits", contender.Take{Keys: fewKeys, Limits: 5}},
			{"one limit", contender.Take{Keys: fewKeys}},
		},
	}}
}

// curves returns the points of the curves in BENCHMARKS.md.
func curves() []Scenario {
	var points []Scenario
	for callers := 1; callers <= 1024; callers *= 4 {
		points = append(points,
			take(fmt.Sprintf("curve-many-%d", callers), manyKeys, callers, Throughput, onRedis(manyKeys)...),
			take(fmt.Sprintf("curve-hot-%d", callers), hotKey, callers, Throughput, onRedis(hotKey)...))
	}
	return points
}

// transactions measures a Take with three more statements in a transaction.
func transactions() []Scenario {
	statements := contender.Body{Accounts: manyKeys}
	of := func(name string, callers int) Scenario {
		return Scenario{
			Name: name, Title: fmt.Sprintf("one limit in a caller's 3-statement SERIALIZABLE transaction, callers: %d", callers),
			Callers: callers, Compare: P50,
			Note: "a call is BEGIN, the limit, SELECT, INSERT and UPDATE on tables of the caller's, COMMIT",
			Contenders: []Contender{
				{ours, contender.InTx{Keys: manyKeys, Body: statements}},
				{raw, contender.RawTx{Keys: manyKeys, Level: pgx.Serializable, Body: statements}},
			},
		}
	}
	return []Scenario{of("tx-1", 1), of("tx-16", 16)}
}

// hotTransactions measures transactions that all want one row.
func hotTransactions() []Scenario {
	body := contender.Body{Pause: 2 * time.Millisecond}
	of := func(name, title string, processes int) Scenario {
		return Scenario{
			Name: name, Title: title, Callers: 32, Compare: Throughput,
			Note: "the limit is taken first, then the client sleeps for 2 ms",
			Contenders: []Contender{
				{ours, contender.InTx{Keys: hotKey, Body: body, Processes: processes}},
				{"READ COMMITTED, raw update", contender.RawTx{Keys: hotKey, Level: pgx.ReadCommitted, Body: body}},
			},
		}
	}
	return []Scenario{
		of("hot-tx", "transactions on one hot key, 32 workers", 1),
		of("hot-8", "transactions on one hot key, 8 Limiters of 4 workers and a pool each", 8),
	}
}

// verbs measures each verb beside a Take.
func verbs() []Scenario {
	verb := func(limits int, net float64, do func(context.Context, *ratelimit.Limiter,
		[]ratelimit.Request) error,
	) contender.Verb {
		return contender.Verb{Keys: fewKeys, Limits: limits, Net: net, Do: do}
	}
	of := func(callers int) Scenario {
		return Scenario{
			Name: fmt.Sprintf("verbs-%d", callers), Callers: callers, Compare: P50,
			Title: fmt.Sprintf("each verb beside a Take, outside transactions, 20k keys, callers: %d", callers),
			Note:  "a call of a row with two verbs is both of them",
			Contenders: []Contender{
				{"Take", contender.Take{Keys: fewKeys}},
				{"Take, refused", contender.Take{Keys: fewKeys, Empty: true}},
				{"Take of five limits", contender.Take{Keys: fewKeys, Limits: 5}},
				{"Take of a sliding window", contender.Sliding{Keys: fewKeys}},
				{"Check", verb(1, 0, contender.CheckOnly)},
				{"Reserve, Settle", verb(1, 1, contender.ReserveAndSettle)},
				{"Reserve, Cancel", verb(1, 0, contender.ReserveAndCancel)},
				{"Reserve, Settle of five limits", verb(5, 1, contender.ReserveAndSettle)},
				{"Charge, Credit", verb(1, 0, contender.ChargeAndCredit)},
				{"Reset", verb(1, 0, contender.Reset)},
				{"Acquire, Release", contender.Acquire{Keys: fewKeys}},
				{"RenewLease", contender.Renewal{}},
			},
		}
	}
	return []Scenario{of(1), of(16)}
}

// byHand measures Take beside limiters that people write themselves.
func byHand() []Scenario {
	of := func(name string, keys, callers int) Scenario {
		return Scenario{
			Name: name, Title: fmt.Sprintf("Take beside limiters by hand, keys: %d, callers: %d", keys, callers),
			Callers: callers, Compare: Throughput,
			Note: "the count over a log lets too many in when calls race",
			Contenders: []Contender{
				{ours, contender.Take{Keys: keys}},
				{"guarded upsert", contender.ByHand{Keys: keys, Take: contender.TakeByUpsert}},
				{"SELECT FOR UPDATE", contender.ByHand{Keys: keys, Take: contender.TakeForUpdate}},
				{"count over a log", contender.ByHand{Keys: keys, Take: contender.TakeByCount}},
			},
		}
	}
	return []Scenario{of("hand-1", manyKeys, 1), of("hand-64", manyKeys, 64), of("hand-hot-64", hotKey, 64)}
}

// inSQL measures the function ratelimit.take, as other languages call it, with a session for each caller.
func inSQL() []Scenario {
	const keys = 1000
	return []Scenario{{
		Name: "sql-64", Title: "calls in SQL, 1,000 keys, sessions: 64", Callers: 64, Compare: Throughput,
		Contenders: []Contender{
			{"ratelimit.take", contender.TakeInSQL{Keys: keys}},
			{"bare UPDATE", contender.Raw{Keys: keys, Sessions: true}},
			{"count over a log table", contender.ByHand{Keys: keys, Take: contender.TakeByFunction, Sessions: true}},
		},
	}}
}

// manyRows measures a Take on large tables.
func manyRows(quick bool) []Scenario {
	million, most := 1_000_000, 10_000_000
	if quick {
		million, most = 50_000, 50_000
	}
	few := Contender{"1,000 keys", contender.Take{Keys: 1000}}
	return []Scenario{
		{
			Name: "keys", Title: "standalone Take, 1,000,000 keys, callers: 16", Callers: 16, Compare: Throughput,
			Contenders: []Contender{{"1,000,000 keys", contender.Take{Keys: million}}, few},
		},
		{
			Name: "ten-million", Title: "standalone Take, 10,000,000 keys, callers: 64", Callers: 64, Compare: Throughput,
			Contenders: []Contender{
				few,
				{"10,000,000 keys", contender.Take{Keys: most}},
				{"10,000,000 keys, skewed", contender.Take{Keys: most, Skewed: true}},
			},
		},
	}
}

// worn measures Take after a checkpoint, and beside an old snapshot.
func worn() []Scenario {
	compressed := func(by string) Contender {
		return Contender{
			"wal_compression = " + by,
			contender.Take{Keys: manyKeys, Checkpoint: true, Settings: map[string]string{"wal_compression": by}},
		}
	}
	return []Scenario{
		{
			Name: "checkpoint-64", Title: "standalone Take, 100k keys, a checkpoint before each turn, callers: 64", Callers: 64,
			Compare: Throughput, Note: "take-64 is the same without checkpoints",
			Contenders: []Contender{compressed("off"), compressed("pglz"), compressed("lz4")},
		},
		{
			Name: "snapshot-64", Title: "standalone Take, beside a snapshot as old as the turn, callers: 64", Callers: 64,
			Compare: Throughput, Note: "-seconds 120 -rounds 1 measures two minutes",
			Contenders: []Contender{
				{ours, contender.Take{Keys: manyKeys}},
				{"beside a snapshot", contender.Take{Keys: manyKeys, Beside: true}},
				{"hot key", contender.Take{Keys: hotKey}},
				{"hot key, beside a snapshot", contender.Take{Keys: hotKey, Beside: true}},
			},
		},
	}
}
