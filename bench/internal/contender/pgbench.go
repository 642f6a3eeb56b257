package contender

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
)

const (
	raceLimit    = 100
	raceAttempts = 8 // of each caller
	races        = 9
	leastCalls   = 20 // of each caller in a round
)

// RaceTable counts, for each contender called by a name, how many calls each race on a limit of 100 admitted.
const RaceTable = `(SELECT by, race, count(*) AS admitted FROM admitted GROUP BY by, race)`

// PGBench has the program pgbench make the calls in SQL, prepared, with a session for each caller.
type PGBench struct {
	Keys   int
	Setup  string // statements that make what Call needs
	Call   string // the statement of a call; :name is the limit, and :key a key
	Rows   string // a query for the number of calls, by the rows that they inserted; empty: they took tokens
	Admits string // an expression that says whether a call on the limit 'race' is admitted; empty: there are no races
}

// TakeInSQL calls ratelimit.take under a stored rule.
func TakeInSQL(n int) PGBench {
	return PGBench{
		Keys: n, Call: `SELECT * FROM ratelimit.take(:name, :key)`,
		Admits: `(SELECT allowed FROM ratelimit.take('race', :key))`,
	}
}

// UpdateInSQL is Raw in SQL.
func UpdateInSQL(n int) PGBench {
	return PGBench{
		Keys: n,
		Call: `UPDATE ratelimit.buckets SET value = value - 1 WHERE name = :name AND key = :key AND shard = 0`,
	}
}

// CountOverALog calls the function that people write by hand: it counts the calls of the last minute. Its limit is
// never reached, so that it does as much as the others.
func CountOverALog(n int) PGBench {
	return PGBench{
		Keys: n, Call: `SELECT check_rate_limit(:key, 1000000, '1 minute')`,
		Rows: `SELECT count(*) FROM calls WHERE key LIKE 'k%'`, Setup: `
		CREATE TABLE calls (key text NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
		CREATE INDEX ON calls (key, at);
		CREATE FUNCTION check_rate_limit(p_key text, p_most integer, p_period interval) RETURNS boolean LANGUAGE plpgsql AS $$
		BEGIN
			IF (SELECT count(*) FROM calls WHERE key = p_key AND at > clock_timestamp() - p_period) >= p_most THEN
				RETURN false;
			END IF;
			INSERT INTO calls (key) VALUES (p_key);
			RETURN true;
		END $$`, Admits: `check_rate_limit('race ' || :key, 100, '1 hour')`,
	}
}

// Open makes the buckets and what the statement needs, and runs the races.
func (w PGBench) Open(ctx context.Context, b Bench) (Runner, error) {
	program, err := exec.LookPath("pgbench")
	if err != nil {
		return nil, unavailable("pgbench is not installed")
	}
	r := &pgbench{PGBench: w, bench: b, program: program}
	if r.directory, err = os.MkdirTemp("", "pgbench"); err != nil {
		return nil, err
	}
	return r, errors.Join(r.prepare(ctx), r.race(ctx))
}

// pgbench is a Runner whose calls another program makes.
type pgbench struct {
	PGBench
	bench              Bench
	of                 buckets
	program, directory string
	calls              int
	throughput         float64 // of the round before
}

func (r *pgbench) prepare(ctx context.Context) (err error) {
	admin, policy := r.bench.Database.Admin(), policyFor(r.Keys)
	const rule = `INSERT INTO ratelimit.rules (version, of, name, says, author, reason)
		SELECT coalesce(max(version), 0) + 1, 'rule', $1, jsonb_build_object('rate', 1, 'period', '1h', 'capacity', $2::float8), 'bench', 'a measurement'
		FROM ratelimit.rules`
	for name, capacity := range map[string]float64{r.bench.Name: policy.Capacity, "race": raceLimit} {
		if _, err := admin.Exec(ctx, rule, name, capacity); err != nil {
			return fmt.Errorf("store a rule for %s: %w", name, err)
		}
	}
	if _, err := admin.Exec(ctx, `CREATE TABLE IF NOT EXISTS admitted (by text, race integer);`+r.Setup); err != nil {
		return fmt.Errorf("make the tables and functions: %w", err)
	}
	call := `\set n random(0, ` + strconv.Itoa(r.Keys-1) + ")\n" + r.Call + ";\n"
	race := `\set i :i + 1` + "\n" + `\set race :i / ` + strconv.Itoa(raceAttempts) +
		"\nINSERT INTO admitted SELECT :name, :race WHERE " + r.Admits + ";\n"
	for name, text := range map[string]string{"call": call, "race": race} {
		text = regexp.MustCompile(`:name\b`).ReplaceAllString(text, "'"+r.bench.Name+"'")
		key := "'k' || lpad(:n::text, " + strconv.Itoa(keyBytes-1) + ", '0')"
		if name == "race" {
			key = "'race ' || :race"
		}
		text = regexp.MustCompile(`:key\b`).ReplaceAllString(text, key)
		if err := os.WriteFile(filepath.Join(r.directory, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	r.of, err = fullBuckets(ctx, r.bench, r.bench.Name, r.Keys)
	return err
}

// race has all callers want more than a new limit has, as fast as they can.
func (r *pgbench) race(ctx context.Context) error {
	if r.Admits == "" {
		return nil
	}
	_, _, err := r.start(ctx, "race", races*raceAttempts, "-D", "i=-1")
	return err
}

var processed = regexp.MustCompile(`(?s)transactions actually processed: (\d+).*tps = ([0-9.]+) \(without initial connection time\)`)

// start has pgbench run a script a number of times in each session. A time would also count the start of the sessions.
func (r *pgbench) start(ctx context.Context, script string, times int,
	args ...string,
) (calls int, throughput float64, err error) {
	args = append([]string{
		"-n", "-M", "prepared", "-j", "2", "-c", strconv.Itoa(r.bench.Callers), "-t", strconv.Itoa(times), "-f",
		filepath.Join(r.directory, script),
	}, args...)
	out, err := exec.CommandContext(ctx, r.program, append(args, r.bench.Database.Admin().Config().ConnString())...).CombinedOutput() //nolint:gosec // ours
	if err != nil {
		return 0, 0, fmt.Errorf("pgbench: %w: %s", err, out)
	}
	found := processed.FindSubmatch(out)
	if found == nil {
		return 0, 0, fmt.Errorf("pgbench says nothing about its calls: %s", out)
	}
	calls, err = strconv.Atoi(string(found[1]))
	if err != nil {
		return 0, 0, err
	}
	throughput, err = strconv.ParseFloat(string(found[2]), 64)
	return calls, throughput, err
}

// Run makes about as many calls as the time of a round is enough for, by the round before.
func (r *pgbench) Run(ctx context.Context, amount load.Amount) (Round, error) {
	least := leastCalls
	if amount.For >= time.Second { // the first calls of a session also make its plans
		least = 200
	}
	times := max(amount.Calls, int(r.throughput*amount.For.Seconds())) / r.bench.Callers
	before, err := r.bench.Database.WAL(ctx)
	if err != nil {
		return Round{}, err
	}
	processor := r.bench.Meter.Seconds()
	calls, throughput, err := r.start(ctx, "call", max(times, least))
	if err != nil {
		return Round{}, err
	}
	processor = r.bench.Meter.Seconds() - processor
	after, err := r.bench.Database.WAL(ctx)
	if err != nil {
		return Round{}, err
	}
	r.calls, r.throughput = r.calls+calls, throughput
	unknown := math.NaN()
	return Round{
		Throughput: throughput, P50: unknown, P99: unknown, Trips: 1, Attempts: unknown,
		WAL: float64(after-before) / float64(calls), Allocations: unknown,
		Processor: processor / float64(calls), Calls: calls,
	}, nil
}

func (r *pgbench) Check(ctx context.Context) error {
	if r.Rows == "" {
		return r.of.check(ctx, float64(r.calls))
	}
	var rows int
	if err := r.bench.Database.Admin().QueryRow(ctx, r.Rows).Scan(&rows); err != nil {
		return fmt.Errorf("count the rows: %w", err)
	}
	if rows != r.calls {
		return fmt.Errorf("pgbench made %d calls, and %d rows are there", r.calls, rows)
	}
	return nil
}

func (r *pgbench) Close() error { return os.RemoveAll(r.directory) }
