package server

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Meter adds up the processor time of this process and of the servers that it measures: what a call costs the machine,
// also when others use it.
type Meter struct {
	directory string // /proc
	postgres  int    // the process that all others of the server are children of; 0: there is none here
	others    []int
}

// NewMeter returns a meter of this process and the servers. It knows nothing where they are not processes of this
// machine, or it has no /proc.
func NewMeter(ctx context.Context, postgres *Postgres, redis map[Durability]*Redis) (*Meter, error) {
	m := &Meter{directory: "/proc", others: []int{os.Getpid()}}
	pool, err := pgxpool.New(ctx, postgres.URL())
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	var backend int
	if err := pool.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&backend); err != nil {
		return nil, err
	}
	if name, parent := m.process(backend); strings.HasPrefix(name, "postgres") {
		m.postgres = parent
	}
	for _, r := range redis {
		m.others = append(m.others, r.process)
	}
	return m, nil
}

// Servers returns the meter without this process.
func (m *Meter) Servers() *Meter {
	servers := *m
	servers.others = slices.DeleteFunc(slices.Clone(m.others), func(pid int) bool { return pid == os.Getpid() })
	return &servers
}

// Seconds returns the processor time so far; NaN when it is not known.
func (m *Meter) Seconds() float64 {
	if m == nil || m.postgres == 0 {
		return math.NaN()
	}
	root := strconv.Itoa(m.postgres)
	children, err := os.ReadFile(filepath.Join(m.directory, root, "task", root, "children"))
	if err != nil {
		return math.NaN()
	}
	sum := m.ran(m.postgres)
	for _, pid := range m.others {
		sum += m.ran(pid)
	}
	for _, child := range strings.Fields(string(children)) {
		if seconds, err := m.read(child); err == nil { // the others have ended
			sum += seconds
		}
	}
	return sum
}

// process returns the name of a process and its parent, "" and 0 when it is gone.
func (m *Meter) process(pid int) (name string, parent int) {
	text, err := os.ReadFile(filepath.Join(m.directory, strconv.Itoa(pid), "stat"))
	if err != nil {
		return "", 0
	}
	// pid (name) state parent ..; the name may have anything in it.
	_, after, _ := strings.Cut(string(text), "(")
	end := strings.LastIndex(after, ")")
	if end < 0 {
		return "", 0
	}
	if fields := strings.Fields(after[end+1:]); len(fields) > 1 {
		parent, _ = strconv.Atoi(fields[1])
	}
	return after[:end], parent
}

// ran returns the seconds that the threads of a process have run; NaN when it is gone.
func (m *Meter) ran(pid int) float64 {
	threads, err := os.ReadDir(filepath.Join(m.directory, strconv.Itoa(pid), "task"))
	if err != nil {
		return math.NaN()
	}
	sum := 0.0
	for _, thread := range threads {
		if seconds, err := m.read(filepath.Join(strconv.Itoa(pid), "task", thread.Name())); err == nil {
			sum += seconds
		}
	}
	return sum
}

// read returns the seconds that a thread has run.
func (m *Meter) read(thread string) (float64, error) {
	text, err := os.ReadFile(filepath.Join(m.directory, thread, "schedstat"))
	if err != nil {
		return 0, err
	}
	ran, _, _ := strings.Cut(string(text), " ")
	nanoseconds, err := strconv.ParseFloat(ran, 64)
	return nanoseconds / 1e9, err
}
