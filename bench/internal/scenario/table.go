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

// The names of contenders in bars.
const (
	ours        = "pgratelimit"
	unbatched   = "one statement a call"
	relaxed     = "pgratelimit, relaxed commits"
	raw         = "raw update, pgx"
	relaxedRaw  = "raw update, relaxed commits"
	naive       = "naive port"
	redis       = "redis_rate"
	pipelined   = "redis_rate, pipelined"
	logged      = "pipelined, AOF everysec"
	flushed     = "pipelined, AOF always"
	rueidis     = "rueidis, pipelined"
	bare        = "without a limit"
	committed   = "READ COMMITTED, raw update"
	inCommitted = "READ COMMITTED, Take"
)

const (
	manyKeys = 100_000
	fewKeys  = 20_000 // for scenarios with several limits
	hotKey   = 1
	body     = 2 * time.Millisecond
)

// All returns every scenario. A quick run has fewer keys.
func All(quick bool) []Scenario {
	scenarios := append(standalone(), refusals()...)
	scenarios = append(scenarios, transactions()...)
	scenarios = append(scenarios, fiveLimits()...)
	scenarios = append(scenarios, pairs()...)
	scenarios = append(scenarios, reservations()...)
	scenarios = append(scenarios, verbs()...)
	scenarios = append(scenarios, kinds()...)
	scenarios = append(scenarios, inSQL("sql-64", 1000), inSQL("sql-few-64", 10))
	scenarios = append(scenarios, hotTransactions()...)
	scenarios = append(scenarios, byHand()...)
	scenarios = append(scenarios, size(quick)...)
	scenarios = append(scenarios, worn(quick)...)
	return append(scenarios, curves()...)
}

// onRedis returns the contenders that keep n keys in Redis.
func onRedis(n int) []Contender {
	return []Contender{
		{redis, contender.RedisRate{Keys: n, Durability: server.Nothing}},
		{pipelined, contender.RedisRate{Keys: n, Pipelined: true, Durability: server.Nothing}},
		{logged, contender.RedisRate{Keys: n, Pipelined: true, Durability: server.Logged}},
		{flushed, contender.RedisRate{Keys: n, Pipelined: true, Durability: server.Flushed}},
		{rueidis, contender.Rueidis{Keys: n}},
	}
}

// take returns the scenario of a standalone Take of one of n keys.
func take(name, keys string, n, callers int, compare Figure, others []Contender, bars ...Bar) Scenario {
	return Scenario{
		Name: name, Title: fmt.Sprintf("standalone Take, %s, callers: %d", keys, callers), Callers: callers, Compare: compare,
		Bars:       bars,
		Contenders: append([]Contender{{ours, contender.Take{Keys: n}}}, others...),
	}
}

func standalone() []Scenario {
	const many, hot = "100k keys", "one hot key"
	fast := Contender{relaxed, contender.Take{Keys: manyKeys, Config: ratelimit.Config{RelaxedCommit: true}}}
	single := Contender{unbatched, contender.Take{Keys: manyKeys, Config: ratelimit.Config{NoBatching: true}}}
	inPostgres := []Contender{
		{raw, contender.Raw{Keys: manyKeys}},
		{naive, contender.Transaction{Keys: manyKeys, Level: pgx.Serializable, Take: contender.TakeNaively}},
	}
	beside := func(redisShare, pipelinedShare float64) []Bar {
		return []Bar{
			{Contender: ours, Figure: Throughput, Against: redis, AtLeast: redisShare},
			{Contender: ours, Figure: Throughput, Against: pipelined, AtLeast: pipelinedShare},
		}
	}
	return []Scenario{
		take("take-1", many, manyKeys, 1, P50, append([]Contender{fast}, inPostgres...),
			Bar{Contender: ours, Figure: P50, Against: raw, AtMost: 1.2}),
		{
			Name: "relaxed-1", Title: "relaxed commits, 100k keys, callers: 1", Callers: 1, Compare: P50,
			Contenders: []Contender{fast, {relaxedRaw, contender.Raw{Keys: manyKeys, Relaxed: true}}},
			Bars:       []Bar{{Contender: relaxed, Figure: P50, Against: relaxedRaw, AtMost: 1.15}},
		},
		slowDisk(fast),
		take("take-16", many, manyKeys, 16, Throughput, append([]Contender{single}, inPostgres...),
			Bar{Contender: ours, Figure: Throughput, Against: raw, AtLeast: 0.75}),
		take("take-64", many, manyKeys, 64, Throughput, append([]Contender{fast, single}, onRedis(manyKeys)...),
			append(beside(1, 0.6), Bar{Contender: ours, Figure: Throughput, Against: unbatched, AtLeast: 3})...),
		take("take-512", many, manyKeys, 512, Throughput, append([]Contender{fast}, onRedis(manyKeys)...), beside(2, 0.8)...),
		take("hot-512", hot, hotKey, 512, Throughput,
			append([]Contender{{raw, contender.Raw{Keys: hotKey}}}, onRedis(hotKey)...), beside(10, 4)...),
	}
}

// slowDisk delays the flush of commits as a cloud disk does. The sleep of commit_delay is the same for all contenders.
func slowDisk(relaxedTake Contender) Scenario {
	return Scenario{
		Name: "disk-1", Title: "100k keys, a flush takes 2 ms longer, callers: 1", Callers: 1, Compare: P50,
		Disk:       2 * time.Millisecond,
		Contenders: []Contender{relaxedTake, {ours, contender.Take{Keys: manyKeys}}, {raw, contender.Raw{Keys: manyKeys}}},
		Bars:       []Bar{{Contender: relaxed, Figure: P50, Against: ours, AtMost: 1. / 8}},
	}
}

// kinds measures a Take of other kinds, or under a stored rule, beside a token bucket, and slots.
func kinds() []Scenario {
	const sliding, stored, slots = "sliding window", "stored rule", "Acquire and Release"
	beside := Contender{ours, contender.Take{Keys: fewKeys}}
	return []Scenario{
		{
			Name: "sliding-64", Title: "Take of a sliding window beside a token bucket, 20k keys, callers: 64", Callers: 64,
			Compare:    Throughput,
			Contenders: []Contender{{sliding, contender.Sliding{Keys: fewKeys}}, beside},
			Bars:       []Bar{{Contender: sliding, Figure: Throughput, Against: ours, AtLeast: 0.45}},
		},
		{
			Name: "rules-64", Title: "Take under a stored rule beside a definition in the code, 20k keys, callers: 64",
			Callers: 64, Compare: Throughput,
			Contenders: []Contender{{stored, contender.Ruled{Keys: fewKeys}}, beside},
			Bars:       []Bar{{Contender: stored, Figure: Throughput, Against: ours, AtLeast: 0.9}},
		},
		{
			Name: "acquire-16", Title: "Acquire and Release of a slot beside a Take, 20k keys, callers: 16", Callers: 16,
			Compare:    Throughput,
			Contenders: []Contender{{slots, contender.Acquire{Keys: fewKeys}}, beside},
			Bars:       []Bar{{Contender: slots, Figure: Trips, AtMost: 3}},
		},
	}
}

// inSQL measures ratelimit.take of one of n keys, called by pgbench.
func inSQL(name string, n int) Scenario {
	const take, update, byHand = "ratelimit.take", "bare UPDATE", "count over a log table"
	admitted := func(of, statistic string) string {
		return `SELECT ` + statistic + ` FROM ` + contender.RaceTable + ` AS a WHERE by = '` + of + `'`
	}
	return Scenario{
		Name: name, Title: fmt.Sprintf("calls in SQL by pgbench, %d keys, sessions: 64", n), Callers: 64, Compare: Throughput,
		Note: "the processor time is the server's; in a race, 512 calls at once want what a limit of 100 has",
		Contenders: []Contender{
			{take, contender.TakeInSQL(n)},
			{update, contender.UpdateInSQL(n)},
			{byHand, contender.CountOverALog(n)},
		},
		Facts: []Fact{
			{Name: "most that take admitted in 9 races", SQL: admitted("contender0", "max(admitted)::float8")},
			{Name: "least that take admitted", SQL: admitted("contender0", "min(admitted)::float8")},
			{Name: "most that the count admitted", SQL: admitted("contender2", "max(admitted)::float8")},
			{Name: "median of what the count admitted", SQL: admitted("contender2",
				"percentile_cont(0.5) WITHIN GROUP (ORDER BY admitted)")},
		},
		Bars: []Bar{
			{Contender: take, Figure: Throughput, Against: update, AtLeast: 0.5},
			{Fact: "most that take admitted in 9 races", AtMost: 100},
		},
	}
}

func refusals() []Scenario {
	const refused, allowed, cached = "refused", "allowed", "refused, refusal cache"
	return []Scenario{
		{
			Name: "refused-16", Title: "refused standalone Take without the cache, 100k keys, 16 callers", Callers: 16,
			Compare: Throughput,
			Note:    "the server itself logs some 50 bytes every 15 s, which is the rest below 0.05 bytes a decision",
			Contenders: []Contender{
				{refused, contender.Take{Keys: manyKeys, Empty: true}},
				{allowed, contender.Take{Keys: manyKeys}},
			},
			Bars: []Bar{
				{Contender: refused, Figure: Throughput, Against: allowed, AtLeast: 2},
				{Contender: refused, Figure: WAL, AtMost: 0.05},
			},
		},
		{
			Name: "cached-1", Title: "refused Take answered by the refusal cache, 100 keys, 1 caller", Callers: 1, Burst: 256,
			Compare: P50,
			Note: "the allocation is the decision's list of states; the clock is read every 256 calls; each key is looked " +
				"at again once a second, which are the round trips",
			Contenders: []Contender{
				{cached, contender.Take{Keys: 100, Empty: true, Config: ratelimit.Config{RefusalCache: 10_000}}},
			},
			Bars: []Bar{
				{Contender: cached, Figure: P50, AtMost: 300e-9},
				{Contender: cached, Figure: Allocations, AtMost: 1.1},
				{Contender: cached, Figure: Trips, AtMost: 0.01},
			},
		},
	}
}

func transactions() []Scenario {
	statements := contender.Body{Accounts: manyKeys}
	of := func(name, title string, callers int, most float64) Scenario {
		return Scenario{
			Name: name, Title: title, Callers: callers, Compare: P50,
			Note: "a call is BEGIN, the limit, SELECT, INSERT and UPDATE on tables of the caller's, COMMIT",
			Contenders: []Contender{
				{ours, contender.InTx{Keys: manyKeys, Body: statements}},
				{raw, contender.Transaction{
					Keys: manyKeys, Level: pgx.Serializable, Body: statements,
					Take: contender.TakeByUpdate,
				}},
				{naive, contender.Transaction{
					Keys: manyKeys, Level: pgx.Serializable, Body: statements,
					Take: contender.TakeNaively,
				}},
				{bare, contender.Transaction{Keys: manyKeys, Level: pgx.Serializable, Body: statements}},
			},
			Bars: []Bar{{Contender: ours, Figure: P50, Against: raw, AtMost: most}},
		}
	}
	return []Scenario{
		of("tx-1", "one limit in a caller's 3-statement SERIALIZABLE transaction, 1 caller", 1, 1.1),
		of("tx-16", "the same, 16 callers", 16, 1.12),
	}
}

func fiveLimits() []Scenario {
	const five, one = "five limits", "one limit"
	of := func(name, title string, callers int, most float64) Scenario {
		return Scenario{
			Name: name, Title: title, Callers: callers, Compare: P50,
			Contenders: []Contender{
				{five, contender.Take{Keys: fewKeys, Limits: 5}},
				{one, contender.Take{Keys: fewKeys}},
			},
			Bars: []Bar{
				{Contender: five, Figure: P50, Against: one, AtMost: most},
				{Contender: five, Figure: Trips, AtMost: 1},
			},
		}
	}
	return []Scenario{
		of("five-1", "five limits in one Take, 20k keys each, 1 caller", 1, 1.8),
		of("five-16", "the same, 16 callers", 16, 2.5),
	}
}

// pairs measures a limit for each key with a global limit. Every call takes from the one bucket of the global limit.
func pairs() []Scenario {
	const two, one = "user and global limit", "user limit alone"
	of := func(callers int, compare Figure) Scenario {
		return Scenario{
			Name: fmt.Sprintf("pair-%d", callers), Callers: callers, Compare: compare,
			Title: fmt.Sprintf("one Take of a limit for each user, 100k keys, and a global limit, 1 key, callers: %d", callers),
			Contenders: []Contender{
				{two, contender.Take{Keys: manyKeys, Global: true}},
				{one, contender.Take{Keys: manyKeys}},
			},
			Bars: []Bar{{Contender: two, Figure: Trips, AtMost: 1}},
		}
	}
	return []Scenario{of(1, P50), of(64, Throughput)}
}

// reservations measures Reserve and Settle. The bar is their round trips without batches, which the integration tests
// require: 2 for Reserve, and 3 for a Settle that returns tokens.
func reservations() []Scenario {
	of := func(callers int, compare Figure) Scenario {
		return Scenario{
			Name: fmt.Sprintf("reserve-%d", callers), Callers: callers, Compare: compare,
			Title:      fmt.Sprintf("Reserve and Settle of one limit, 100k keys, callers: %d", callers),
			Note:       "a call is one Reserve of 3 tokens and one Settle that returns 2 of them, each outside of a transaction",
			Contenders: []Contender{{ours, contender.Reserve{Keys: manyKeys}}},
			Bars:       []Bar{{Contender: ours, Figure: Trips, AtMost: 5}},
		}
	}
	return []Scenario{of(1, P50), of(16, Throughput), of(64, Throughput)}
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

func hotTransactions() []Scenario {
	pause := contender.Body{Pause: body}
	return []Scenario{
		{
			Name: "hot-tx", Title: "one hot key, 32 workers, transactions with a 2 ms body", Callers: 32, Compare: Throughput,
			Note: "the limit is taken first; the body is a sleep of the client's",
			Contenders: []Contender{
				{ours, contender.InTx{Keys: hotKey, Body: pause}},
				{committed, contender.Transaction{
					Keys: hotKey, Level: pgx.ReadCommitted, Body: pause,
					Take: contender.TakeByUpdate,
				}},
				{naive, contender.Transaction{Keys: hotKey, Level: pgx.Serializable, Body: pause, Take: contender.TakeNaively}},
			},
			Bars: []Bar{
				{Contender: ours, Figure: Throughput, Against: committed, AtLeast: 0.95},
				{Contender: ours, Figure: Attempts, AtMost: 1.02},
			},
		},
		{
			Name: "hot-8", Title: "one hot key, 8 processes of 4 workers each, transactions with a 2 ms body", Callers: 32,
			Compare: Throughput,
			Note:    "each process is a Limiter with a pool of its own; the limit is taken first",
			Contenders: []Contender{
				{ours, contender.InTx{Keys: hotKey, Body: pause, Processes: 8}},
				{inCommitted, contender.InTx{Keys: hotKey, Body: pause, Processes: 8, Committed: true}},
				{committed, contender.Transaction{
					Keys: hotKey, Level: pgx.ReadCommitted, Body: pause,
					Take: contender.TakeByUpdate,
				}},
			},
			Bars: []Bar{
				{Contender: ours, Figure: Attempts, AtMost: 1.1},
			},
		},
	}
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

// worn measures Take on a server that isn't as good as new: after a checkpoint, with many keys, beside an old snapshot.
func worn(quick bool) []Scenario {
	keys := 10_000_000
	if quick {
		keys = 50_000
	}
	const few = 1000
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
			Name: "ten-million", Title: "standalone Take, 10,000,000 keys, callers: 64", Callers: 64, Compare: Throughput,
			Contenders: []Contender{
				{"1,000 keys", contender.Take{Keys: few}},
				{"10,000,000 keys", contender.Take{Keys: keys}},
				{"10,000,000 keys, skewed", contender.Take{Keys: keys, Skewed: true}},
			},
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

func size(quick bool) []Scenario {
	keys, note := 1_000_000, ""
	if quick {
		keys = 50_000
		note = fmt.Sprintf("quick: %d keys in place of 1,000,000", keys)
	}
	const few, many = "1,000 keys", "1,000,000 keys"
	return []Scenario{{
		Name: "keys", Title: "standalone Take, 1,000,000 keys and 1,000 keys, 16 callers", Note: note, Callers: 16,
		Compare:    Throughput,
		Contenders: []Contender{{many, contender.Take{Keys: keys}}, {few, contender.Take{Keys: 1000}}},
		Facts: []Fact{{
			Name: "bytes a bucket, with the index",
			SQL:  `SELECT pg_total_relation_size('ratelimit.buckets')::float8 / count(*) FROM ratelimit.buckets`,
		}},
		Bars: []Bar{{Contender: many, Figure: Throughput, Against: few, AtLeast: 0.9}},
	}}
}
