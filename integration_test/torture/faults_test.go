//go:build unix

package torture_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// patient bounds what ends by itself. It decides nothing: it is far more than anything takes on a machine that is busy
// with other work.
const patient = 2 * time.Minute

// quick is how soon calls must be allowed again, on an idle machine.
const quick = 5 * time.Second

// errNobody is why a fault did not happen: there was no session, or it was gone.
var errNobody = errors.New("no session to do it to")

// fault is one way to break something. It returns the broken thing, when calls can work again.
type fault struct {
	name  string
	cause func(context.Context) (what string, err error)
}

// faults does faults to the server and to the clients of a run.
type faults struct {
	server   *postgrestest.Server
	client   *client
	children *children
	random   *rand.Rand
	file     *os.File

	done     map[string]int
	recovery []time.Duration
	slow     int // recoveries that took longer than quick
}

func newFaults(directory string, seed uint64) (*faults, error) {
	file, err := os.Create(filepath.Join(directory, "faults.tsv"))
	return &faults{random: rand.New(rand.NewPCG(seed, 1<<32)), file: file, done: map[string]int{}}, err
}

// kinds returns the faults there are. Those to processes need the server on this machine.
func (f *faults) kinds(ctx context.Context) ([]fault, error) {
	all := []fault{
		{"pg_terminate_backend", func(ctx context.Context) (string, error) { return f.tell(ctx, "pg_terminate_backend") }},
		{"pg_cancel_backend", func(ctx context.Context) (string, error) { return f.tell(ctx, "pg_cancel_backend") }},
		{"immediate stop", f.stop(postgrestest.Immediate)},
		{"fast stop", f.stop(postgrestest.Fast)},
		{"answers lost", f.loseAnswers(allStatements)},
		{"answer to COMMIT lost", f.loseAnswers(onlyCommits)},
		{"client killed", func(context.Context) (string, error) { return "", f.children.kill() }},
	}
	var directory string
	err := f.outside(ctx, func(conn *pgx.Conn) error { return conn.QueryRow(ctx, `SHOW data_directory`).Scan(&directory) })
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(directory); err != nil {
		return all, nil //nolint:nilerr // the server is in a container
	}
	return append(all,
		fault{"backend stopped and continued", f.pauseBackend},
		fault{"backend killed", f.killBackend},
		fault{"postmaster killed", f.stop(postgrestest.Kill)},
	), nil
}

// run does one fault after the other, each kind once in a round, until ctx ends, and each kind once at least. Between them is
// up to so long.
func (f *faults) run(ctx context.Context, rounds int, between time.Duration) error {
	kinds, err := f.kinds(ctx)
	if err != nil {
		return err
	}
	for round := range rounds {
		f.random.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
		for _, kind := range kinds {
			select {
			case <-ctx.Done():
				if round > 0 {
					return nil
				}
			case <-time.After(time.Duration(f.random.Int64N(int64(between)))):
			}
			if err := f.do(context.WithoutCancel(ctx), kind); err != nil {
				return err
			}
		}
	}
	return nil
}

// do does a fault, and waits until calls of both kinds are allowed again.
func (f *faults) do(ctx context.Context, kind fault) error {
	ctx, cancel := context.WithTimeout(ctx, patient)
	defer cancel()
	began := now()
	what, err := kind.cause(ctx)
	for errors.Is(err, errNobody) && ctx.Err() == nil {
		what, err = kind.cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", kind.name, err)
	}
	healed := time.Now()
	if err := f.awaitProgress(ctx); err != nil {
		return fmt.Errorf("after %s of %s at %d no more calls are allowed: %w", kind.name, what, began, err)
	}
	recovery := time.Since(healed)
	f.done[kind.name]++
	f.recovery = append(f.recovery, recovery)
	if recovery > quick {
		f.slow++
	}
	_, err = fmt.Fprintf(f.file, "%d\t%d\tfault\t%s\t%s\tprogress after %v\n", began, healed.UnixMicro(), kind.name, what, recovery)
	return err
}

// awaitProgress returns when a call outside of a transaction was allowed, and a transaction that takes was committed.
func (f *faults) awaitProgress(ctx context.Context) error {
	alone, tx := f.client.allowed.Load()-f.client.allowedTx.Load(), f.client.allowedTx.Load()
	return until(ctx, func() bool {
		inTx := f.client.allowedTx.Load()
		return f.client.allowed.Load()-inTx > alone && inTx > tx
	})
}

// until returns when done is true.
func until(ctx context.Context, done func() bool) error {
	ticker := time.NewTicker(2 * time.Millisecond)
	defer ticker.Stop()
	for !done() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
	return nil
}

// pause lets time pass in a run. The findings do not depend on its length.
func pause(d time.Duration) { <-time.After(d) }

// outside does something on a connection that no fault is done to. It waits until the server takes one.
func (f *faults) outside(ctx context.Context, do func(*pgx.Conn) error) error {
	config, err := pgx.ParseConfig(f.server.URL())
	if err != nil {
		return err
	}
	config.RuntimeParams["application_name"] = outsideSessions
	var conn *pgx.Conn
	connected := until(ctx, func() bool {
		conn, err = pgx.ConnectConfig(ctx, config)
		return err == nil
	})
	if connected != nil {
		return errors.Join(connected, err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return do(conn)
}

// victim draws a session of a limiter, mostly a busy one.
func (f *faults) victim(ctx context.Context, conn *pgx.Conn) (pid int, state string, err error) {
	err = conn.QueryRow(ctx, `SELECT pid, state || ' ' || coalesce(wait_event_type, '') FROM pg_stat_activity
		WHERE application_name = $1 AND state IS NOT NULL ORDER BY (state <> 'idle')::int * random() DESC LIMIT 1`, limiterSessions).Scan(&pid, &state)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, "", errNobody
	}
	return pid, state, err
}

// tell calls a function of the server on a session.
func (f *faults) tell(ctx context.Context, function string) (what string, err error) {
	err = f.outside(ctx, func(conn *pgx.Conn) error {
		pid, state, err := f.victim(ctx, conn)
		if err != nil {
			return err
		}
		what = fmt.Sprintf("%d (%s)", pid, state)
		_, err = conn.Exec(ctx, "SELECT "+function+"($1)", pid)
		return err
	})
	return what, err
}

// signal sends a signal to the process of a session.
func (f *faults) signal(ctx context.Context, signal syscall.Signal) (pid int, what string, err error) {
	err = f.outside(ctx, func(conn *pgx.Conn) (err error) {
		if pid, what, err = f.victim(ctx, conn); err != nil {
			return err
		}
		if err := syscall.Kill(pid, signal); err != nil {
			return errNobody
		}
		return nil
	})
	return pid, fmt.Sprintf("%d (%s)", pid, what), err
}

func (f *faults) pauseBackend(ctx context.Context) (what string, err error) {
	pid, what, err := f.signal(ctx, syscall.SIGSTOP)
	if err != nil {
		return "", err
	}
	pause(time.Duration(50+f.random.IntN(1500)) * time.Millisecond) // it may hold what every other session waits for
	return what, syscall.Kill(pid, syscall.SIGCONT)
}

// killBackend takes away the process of a session, upon which the server ends all others and recovers.
func (f *faults) killBackend(ctx context.Context) (what string, err error) {
	_, what, err = f.signal(ctx, syscall.SIGKILL)
	if err != nil {
		return "", err
	}
	return what, f.outside(ctx, func(*pgx.Conn) error { return nil })
}

func (f *faults) stop(mode postgrestest.StopMode) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		if err := f.server.Stop(ctx, mode); err != nil {
			return "", err
		}
		return "the server", f.server.Restart(ctx)
	}
}
