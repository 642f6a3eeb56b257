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
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// PGBench is Raw by PostgreSQL's own program. Its client costs almost nothing, so it shows the server's maximum.
type PGBench struct {
	Keys int
}

// firstTransactions is the number of each client's transactions in the first round. Its speed determines the size of later rounds.
const firstTransactions = 100

// Open creates the rows and writes the script.
func (w PGBench) Open(ctx context.Context, b Bench) (_ Runner, err error) {
	program, err := exec.LookPath("pgbench")
	if err != nil {
		return nil, unavailable("no pgbench on the PATH")
	}
	if err := fill(ctx, b, b.Name, w.Keys, policyFor(w.Keys).Capacity, policyFor(w.Keys).Capacity); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "pgratelimit-pgbench-")
	if err != nil {
		return nil, err
	}
	script := fmt.Sprintf("\\set i random(0, %d)\nUPDATE ratelimit.buckets SET value = value - 1"+
		" WHERE name = '%s' AND key = 'k' || lpad(:i::text, %d, '0') AND shard = 0;\n", w.Keys-1, b.Name, keyBytes-1)
	if err := os.WriteFile(filepath.Join(dir, "script"), []byte(script), 0o600); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return &pgbench{bench: b, program: program, dir: dir}, nil
}

type pgbench struct {
	bench        Bench
	program, dir string
	throughput   float64 // of the last round
}

func (p *pgbench) Run(ctx context.Context, amount load.Amount) (Round, error) {
	each := firstTransactions
	if p.throughput > 0 {
		each = max(1, int(p.throughput*amount.For.Seconds())/p.bench.Callers)
	}
	before, err := p.bench.Database.WAL(ctx)
	if err != nil {
		return Round{}, err
	}
	output, err := p.pgbench(ctx, each)
	if err != nil {
		return Round{}, err
	}
	after, err := p.bench.Database.WAL(ctx)
	if err != nil {
		return Round{}, err
	}
	if p.throughput, err = parseThroughput(output); err != nil {
		return Round{}, err
	}
	took, err := p.latencies()
	if err != nil {
		return Round{}, err
	}
	return Round{
		Throughput:  p.throughput,
		P50:         stats.Percentile(took, 50).Seconds(),
		P99:         stats.Percentile(took, 99).Seconds(),
		Trips:       math.NaN(),
		Attempts:    math.NaN(),
		WAL:         float64(after-before) / float64(len(took)),
		Allocations: math.NaN(),
		Processor:   math.NaN(), // pgbench is another process
		Calls:       len(took),
	}, nil
}

// pgbench runs the program with so many transactions for each client, and returns its output.
func (p *pgbench) pgbench(ctx context.Context, each int) (string, error) {
	clients := strconv.Itoa(p.bench.Callers)
	cmd := exec.CommandContext(ctx, p.program, "--no-vacuum", "--protocol=prepared", "--client="+clients,
		"--jobs="+strconv.Itoa(min(p.bench.Callers, runtime.NumCPU())), "--transactions="+strconv.Itoa(each), "--file=script",
		"--log", "--log-prefix=log")
	c := p.bench.Database.Admin().Config().ConnConfig
	cmd.Dir = p.dir
	cmd.Env = append(os.Environ(), "PGHOST="+c.Host, "PGPORT="+strconv.Itoa(int(c.Port)), "PGUSER="+c.User,
		"PGPASSWORD="+c.Password, "PGDATABASE="+c.Database, "PGSSLMODE=disable", "LC_ALL=C")
	output, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("pgbench: %w\n%s", err, output)
	}
	return string(output), nil
}

var tps = regexp.MustCompile(`(?m)^tps = ([0-9.]+) \((?:without initial connection time|excluding connections establishing)\)`)

// parseThroughput returns the transactions a second that pgbench reports, without the time to connect.
func parseThroughput(output string) (float64, error) {
	found := tps.FindStringSubmatch(output)
	if found == nil {
		return 0, fmt.Errorf("pgbench did not say how fast it was:\n%s", output)
	}
	return strconv.ParseFloat(found[1], 64)
}

// latencies returns the durations of the transactions in ascending order, and removes their logs.
func (p *pgbench) latencies() (took []time.Duration, err error) {
	logs, err := filepath.Glob(filepath.Join(p.dir, "log.*"))
	if err != nil {
		return nil, err
	}
	for _, log := range logs {
		text, err := os.ReadFile(log)
		if err == nil {
			took, err = parseLog(took, string(text))
		}
		if err := errors.Join(err, os.Remove(log)); err != nil {
			return nil, fmt.Errorf("read pgbench's log: %w", err)
		}
	}
	slices.Sort(took)
	return took, nil
}

// parseLog appends the third field of each line to took: the transaction's microseconds.
func parseLog(took []time.Duration, log string) ([]time.Duration, error) {
	for line := range strings.Lines(log) {
		var client, number, us int64
		if _, err := fmt.Sscan(line, &client, &number, &us); err != nil {
			return took, fmt.Errorf("line %q: %w", line, err)
		}
		took = append(took, time.Duration(us)*time.Microsecond)
	}
	return took, nil
}

func (p *pgbench) Check(context.Context) error { return nil }

func (p *pgbench) Close() error { return os.RemoveAll(p.dir) }
