//go:build unix

package torture_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/child"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

// patient bounds what ends by itself. It decides nothing: it is far more than anything takes on a machine that is busy
// with other work.
const patient = 2 * time.Minute

// errNobody is why a fault did not happen: there was no session, or it was gone.
var errNobody = errors.New("no session to do it to")

// fault is one way to break something. It returns when calls can work again.
type fault struct {
	name  string
	cause func(context.Context) error
}

// faults does faults to the server and to the processes of a run.
type faults struct {
	server *postgrestest.Server
	client *client
	random *rand.Rand
	done   map[string]int

	config  clientConfig // of the process beside this one
	started uint64
	process *child.Process
}

// kinds returns the faults there are. Those to processes of the server need it on this machine.
func (f *faults) kinds(ctx context.Context) ([]fault, error) {
	all := []fault{
		{"pg_terminate_backend", func(ctx context.Context) error { return f.tell(ctx, "SELECT pg_terminate_backend($1)") }},
		{"pg_cancel_backend", func(ctx context.Context) error { return f.tell(ctx, "SELECT pg_cancel_backend($1)") }},
		{"immediate stop", func(ctx context.Context) error { return f.stop(ctx, postgrestest.Immediate) }},
		{"fast stop", func(ctx context.Context) error { return f.stop(ctx, postgrestest.Fast) }},
		{"answers lost", func(ctx context.Context) error { return f.client.answers.lose(ctx, false, 4+f.random.Int64N(12)) }},
		{"answer to COMMIT lost", func(ctx context.Context) error { return f.client.answers.lose(ctx, true, 4+f.random.Int64N(12)) }},
		{"client killed", func(context.Context) error {
			f.process.Kill()
			return f.startProcess()
		}},
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
		fault{"postmaster killed", func(ctx context.Context) error { return f.stop(ctx, postgrestest.Kill) }},
	), nil
}

// startProcess starts the next process that calls beside this one.
func (f *faults) startProcess() (err error) {
	f.started++
	config := f.config
	config.Name = fmt.Sprintf("child%d", f.started)
	config.Seed += f.started
	f.process, err = child.Start(config, func([]byte) bool { return false })
	return err
}

// run does one fault after the other, each kind once in a round, until ctx ends, and each kind once at least. Between
// them is up to so long.
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

// do does a fault, and waits until a call outside of a transaction is allowed, and a transaction that takes is
// committed.
func (f *faults) do(ctx context.Context, kind fault) error {
	ctx, cancel := context.WithTimeout(ctx, patient)
	defer cancel()
	e := &entry{Begin: now(), Verb: "fault", Path: kind.name, Outcome: allowed}
	err := kind.cause(ctx)
	for errors.Is(err, errNobody) && ctx.Err() == nil {
		err = kind.cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", kind.name, err)
	}
	alone, tx := f.client.allowed.Load(), f.client.allowedTx.Load()
	err = until(ctx, func() bool { return f.client.allowed.Load() > alone && f.client.allowedTx.Load() > tx })
	if err != nil {
		return fmt.Errorf("after %s at %d no more calls are allowed: %w", kind.name, e.Begin, err)
	}
	f.done[kind.name]++
	e.End = now()
	return f.client.history.write(e)
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
func (f *faults) outside(ctx context.Context, do func(*pgx.Conn) error) (err error) {
	var conn *pgx.Conn
	connected := until(ctx, func() bool {
		conn, err = pgx.Connect(ctx, f.server.URL())
		return err == nil
	})
	if connected != nil {
		return errors.Join(connected, err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return do(conn)
}

// toVictim draws a session of a limiter, mostly a busy one.
func (f *faults) toVictim(ctx context.Context, do func(conn *pgx.Conn, pid int) error) error {
	return f.outside(ctx, func(conn *pgx.Conn) error {
		var pid int
		err := conn.QueryRow(ctx, `SELECT pid FROM pg_stat_activity WHERE application_name = $1 AND state IS NOT NULL
			ORDER BY (state <> 'idle')::int * random() DESC LIMIT 1`, limiterSessions).Scan(&pid)
		if errors.Is(err, pgx.ErrNoRows) {
			return errNobody
		}
		if err != nil {
			return err
		}
		return do(conn, pid)
	})
}

// tell executes a statement about a session.
func (f *faults) tell(ctx context.Context, sql string) error {
	return f.toVictim(ctx, func(conn *pgx.Conn, pid int) error {
		_, err := conn.Exec(ctx, sql, pid)
		return err
	})
}

// signal sends a signal to the process of a session.
func (f *faults) signal(ctx context.Context, signal syscall.Signal) (victim int, err error) {
	err = f.toVictim(ctx, func(_ *pgx.Conn, pid int) error {
		victim = pid
		if syscall.Kill(pid, signal) != nil {
			return errNobody
		}
		return nil
	})
	return victim, err
}

func (f *faults) pauseBackend(ctx context.Context) error {
	pid, err := f.signal(ctx, syscall.SIGSTOP)
	if err != nil {
		return err
	}
	pause(time.Duration(50+f.random.IntN(1500)) * time.Millisecond) // it may hold what every other session waits for
	return syscall.Kill(pid, syscall.SIGCONT)
}

// killBackend takes away the process of a session, upon which the server ends all others and recovers.
func (f *faults) killBackend(ctx context.Context) error {
	if _, err := f.signal(ctx, syscall.SIGKILL); err != nil {
		return err
	}
	return f.outside(ctx, func(*pgx.Conn) error { return nil })
}

func (f *faults) stop(ctx context.Context, mode postgrestest.StopMode) error {
	if err := f.server.Stop(ctx, mode); err != nil {
		return err
	}
	return f.server.Restart(ctx)
}
