package integration_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The environment of TestDeployedProcess.
const (
	deployedURL     = "RATELIMIT_TEST_DEPLOYED_URL"     // makes it a process of TestARollingDeploymentOfTwoProcesses
	deployedPolicy  = "RATELIMIT_TEST_DEPLOYED_POLICY"  // which of deployedPolicies it decides by
	deployedVersion = "RATELIMIT_TEST_DEPLOYED_VERSION" // "old" or "new"
)

// deployedPolicies are what an old and a new version of a program say of one limit, and what either allows in any span at most.
var deployedPolicies = map[string]struct {
	versions map[string]ratelimit.Policy
	most     func(span time.Duration) float64
}{
	"BucketRaised": {
		versions: map[string]ratelimit.Policy{
			"old": ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 5},
			"new": ratelimit.TokenBucket{Rate: 20, Period: time.Second, Capacity: 15},
		},
		most: func(span time.Duration) float64 { return 15 + 20*span.Seconds() },
	},
	"BucketLowered": {
		versions: map[string]ratelimit.Policy{
			"old": ratelimit.TokenBucket{Rate: 20, Period: time.Second, Capacity: 15},
			"new": ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 5},
		},
		most: func(span time.Duration) float64 { return 15 + 20*span.Seconds() },
	},
	"BucketFasterAndSmaller": {
		versions: map[string]ratelimit.Policy{
			"old": ratelimit.TokenBucket{Rate: 5, Period: time.Second, Capacity: 20},
			"new": ratelimit.TokenBucket{Rate: 30, Period: time.Second, Capacity: 2},
		},
		most: func(span time.Duration) float64 { return 20 + 30*span.Seconds() },
	},
	"WindowRaised": {
		versions: map[string]ratelimit.Policy{
			"old": ratelimit.FixedWindow{Rate: 4, Period: 200 * time.Millisecond, Start: deployDay},
			"new": ratelimit.FixedWindow{Rate: 7, Period: 200 * time.Millisecond, Start: deployDay},
		},
		most: func(span time.Duration) float64 { return 7 * float64(2+span/(200*time.Millisecond)) },
	},
	"SlidingWindowLowered": {
		versions: map[string]ratelimit.Policy{
			"old": ratelimit.SlidingWindow{Rate: 8, Period: 400 * time.Millisecond, Slices: 4},
			"new": ratelimit.SlidingWindow{Rate: 5, Period: 400 * time.Millisecond, Slices: 4},
		},
		most: func(span time.Duration) float64 { return 8 * float64(1+span/(400*time.Millisecond)) },
	},
}

// TestDeployedProcess is not a test but a process of a rolling deployment. Its workers ask in every way, by themselves and in transactions, until
// its input ends. It writes a line for each token that it was given, and for each refusal.
func TestDeployedProcess(t *testing.T) { //nolint:paralleltest // alone in its process
	url := os.Getenv(deployedURL)
	if url == "" {
		t.Skip("a process of TestARollingDeploymentOfTwoProcesses")
	}
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	config.MaxConns = 6
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	b := &bundle{pool: pool, schema: "ratelimit"}
	limiter := b.with(t, ratelimit.Config{DenyCache: 100, MaxAttempts: 1000}) // so many, as it is SERIALIZABLE beside others
	limit := ratelimit.Define("deployed", deployedPolicies[os.Getenv(deployedPolicy)].versions[os.Getenv(deployedVersion)])
	var over atomic.Bool
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		over.Store(true)
	}()
	var mu sync.Mutex
	ways := callers()
	require.NoError(t, atonce.Do(len(ways), func(worker int) error {
		for !over.Load() {
			d, err := ways[worker].take(t.Context(), pool, limiter, limit.For("hot"), roomy.For("beside"))
			if err != nil {
				return err
			}
			mu.Lock()
			_, err = fmt.Printf("asked %d %t\n", d.At.UnixMicro(), d.Allowed)
			mu.Unlock()
			if err != nil {
				return err
			}
		}
		return nil
	}))
	require.NoError(t, limiter.Close(t.Context()))
}

// A new version of a program takes over from an old one, each in processes of its own, and their limits differ. While both run, no
// span has more than what the larger capacity and the higher rate allow, nobody gets an error, and both get answers.
func TestARollingDeploymentOfTwoProcesses(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "ten processes")
	for name, test := range deployedPolicies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			old := startDeployed(t, b, name, "old")
			old.awaitGiven(t, 12)
			after := startDeployed(t, b, name, "new")
			after.awaitAsked(t, 30) // nothing is promised to either: the other may always be quicker
			old.awaitAsked(t, 30)
			old.end(t)
			after.awaitGiven(t, 12)
			after.end(t)
			requireSpans(t, append(old.given, after.given...), test.most)
			t.Logf("old: %d given, %d refused; new: %d given, %d refused", len(old.given), old.refused, len(after.given), after.refused)
		})
	}
}

// requireSpans checks each span between two instants, in microseconds, at which a token was given. A call knows the instant at which its
// statement began, and may have waited for the row since then: so those that wait when a span ends count for it, though what they
// were given arrived later.
func requireSpans(t *testing.T, given []int64, most func(time.Duration) float64) {
	t.Helper()
	waiting := float64(2 * len(callers()))
	slices.Sort(given)
	for from := range given {
		for to := from; to < len(given); to++ {
			span := time.Duration(given[to]-given[from]) * time.Microsecond
			if n := float64(to - from + 1); n > most(span)+waiting {
				require.LessOrEqual(t, n, most(span)+waiting, "tokens in %v", span)
			}
		}
	}
}

// deployedProcess is a TestDeployedProcess and what it has written so far.
type deployedProcess struct {
	input io.Closer
	wait  func() error
	read  chan struct{}

	mu      sync.Mutex
	given   []int64 // microseconds since 1970
	refused int
	said    []string // what else it has written
}

func startDeployed(t *testing.T, b *bundle, policy, version string) *deployedProcess {
	t.Helper()
	ctx, kill := context.WithCancel(context.WithoutCancel(t.Context()))
	command := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestDeployedProcess$")
	command.Env = append(os.Environ(), deployedURL+"="+b.pool.Config().ConnString(), deployedPolicy+"="+policy, deployedVersion+"="+version)
	input, err := command.StdinPipe()
	require.NoError(t, err)
	output, err := command.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, command.Start())
	p := &deployedProcess{input: input, wait: sync.OnceValue(command.Wait), read: make(chan struct{})}
	go func() {
		defer close(p.read)
		for lines := bufio.NewScanner(output); lines.Scan(); {
			p.heard(lines.Text())
		}
	}()
	t.Cleanup(func() {
		kill()
		<-p.read
		_ = p.wait()
	})
	return p
}

func (p *deployedProcess) heard(line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var at int64
	var allowed bool
	if _, err := fmt.Sscanf(line, "asked %d %t", &at, &allowed); err != nil {
		p.said = append(p.said, line)
		return
	}
	if allowed {
		p.given = append(p.given, at)
	} else {
		p.refused++
	}
}

// awaitGiven returns when the process was given that many more.
func (p *deployedProcess) awaitGiven(t *testing.T, more int) {
	t.Helper()
	p.await(t, more, func() int { return len(p.given) })
}

// awaitAsked returns when the process has had that many more answers.
func (p *deployedProcess) awaitAsked(t *testing.T, more int) {
	t.Helper()
	p.await(t, more, func() int { return len(p.given) + p.refused })
}

func (p *deployedProcess) await(t *testing.T, more int, of func() int) {
	t.Helper()
	count := func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return of()
	}
	want := count() + more
	eventually(t, "the process has its answers", func() bool {
		select {
		case <-p.read:
			require.Fail(t, "the process has ended", "%v", p.said)
		default:
		}
		return count() >= want
	})
}

// end ends the process, which must have met no error.
func (p *deployedProcess) end(t *testing.T) {
	t.Helper()
	require.NoError(t, p.input.Close())
	<-p.read
	require.NoError(t, p.wait(), "%v", p.said)
	require.Contains(t, p.said, "PASS")
}
