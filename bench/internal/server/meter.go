package server

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Meter adds up the processor time of some processes and of a Postgres. It does not count other programs.
type Meter struct {
	directory string // /proc
	postgres  int    // the postmaster; 0: the server is on another machine
	others    []int
}

// NewMeter returns a meter of the server and of other processes. It returns NaN if the server is on another machine, or
// without /proc.
func NewMeter(postgres *Postgres, others ...int) *Meter {
	m := &Meter{directory: "/proc", others: others}
	name, _ := os.ReadFile(filepath.Join(m.directory, strconv.Itoa(postgres.process), "comm"))
	if strings.HasPrefix(string(name), "postgres") {
		m.postgres = postgres.process
	}
	return m
}

// Seconds returns the processor time so far, or NaN.
func (m *Meter) Seconds() float64 {
	if m == nil || m.postgres == 0 {
		return math.NaN()
	}
	root := strconv.Itoa(m.postgres)
	children, err := os.ReadFile(filepath.Join(m.directory, root, "task", root, "children"))
	if err != nil {
		return math.NaN()
	}
	sum := m.ran(m.postgres) + m.reaped(root)
	for _, pid := range m.others {
		sum += m.ran(pid)
	}
	for _, child := range strings.Fields(string(children)) {
		if seconds, err := m.read(child); err == nil { // ended processes are skipped
			sum += seconds
		}
	}
	return sum
}

// reaped returns the processor seconds of a process's ended children.
func (m *Meter) reaped(pid string) float64 {
	const user, system, ticks = 13, 14, 100 // after the name, which is in brackets
	text, _ := os.ReadFile(filepath.Join(m.directory, pid, "stat"))
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) <= system {
		return 0
	}
	a, errA := strconv.ParseFloat(fields[user], 64)
	b, errB := strconv.ParseFloat(fields[system], 64)
	if errA != nil || errB != nil {
		return 0
	}
	return (a + b) / ticks
}

// ran returns the processor seconds of a process's threads, or NaN if it has ended.
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

// read returns the processor seconds of a thread.
func (m *Meter) read(thread string) (float64, error) {
	text, err := os.ReadFile(filepath.Join(m.directory, thread, "schedstat"))
	if err != nil {
		return 0, err
	}
	ran, _, _ := strings.Cut(string(text), " ")
	nanoseconds, err := strconv.ParseFloat(ran, 64)
	return nanoseconds / 1e9, err
}
