package simulate

import (
	"bytes"
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// maxHeld is the number of bytes of held lines, beyond which the earliest line is decided before its window ends.
const maxHeld = 256 << 20

// held is a line that waits until no earlier line can follow.
type held struct {
	record record
	source *reader
	number int64
	size   int
}

// compare orders lines by time, then by source and line.
func (h *held) compare(o *held) int {
	return cmp.Or(h.record.at.Compare(o.record.at), cmp.Compare(h.source.index, o.source.index),
		cmp.Compare(h.number, o.number))
}

// reader reads the lines of one source.
type reader struct {
	*lines
	name    string
	index   int
	parser  *parser
	latest  time.Time // of the lines up to now; zero: no line could be read
	invalid Problems
}

// merge reads sources in the order of time. All are open, and the one whose lines are the earliest is read next. Its
// next line is no earlier than its latest line less the window, so all held lines before that can be decided.
type merge struct {
	window    time.Duration
	all, open []*reader // open is a heap by latest
	held      lateness
	size      int       // of held
	decided   time.Time // of the latest line that next has returned
	spare     []*held
	reads     int
	report    *Report
}

// lateness is a heap of held lines.
type lateness []*held

func (l lateness) Len() int           { return len(l) }
func (l lateness) Less(i, j int) bool { return l[i].compare(l[j]) < 0 }
func (l lateness) Swap(i, j int)      { l[i], l[j] = l[j], l[i] }
func (l *lateness) Push(h any)        { *l = append(*l, h.(*held)) } //nolint:forcetypeassert // of heap.Push below
func (l *lateness) Pop() any {
	last := (*l)[len(*l)-1]
	(*l)[len(*l)-1] = nil
	*l = (*l)[:len(*l)-1]
	return last
}

// oldest is a heap of the open readers.
type oldest struct{ *merge }

func (o oldest) Len() int           { return len(o.open) }
func (o oldest) Less(i, j int) bool { return o.open[i].latest.Before(o.open[j].latest) }
func (o oldest) Swap(i, j int)      { o.open[i], o.open[j] = o.open[j], o.open[i] }
func (o oldest) Push(r any)         { o.open = append(o.open, r.(*reader)) } //nolint:forcetypeassert // of begin
func (o oldest) Pop() any {
	last := o.open[len(o.open)-1]
	o.open = o.open[:len(o.open)-1]
	return last
}

// add opens a source. Call close also after an error.
func (m *merge) add(source *Source, p *parser) error {
	lines, err := source.open()
	if err != nil {
		return err
	}
	m.all = append(m.all, &reader{lines: lines, name: source.Name, index: len(m.all), parser: p})
	return nil
}

// checkTwice returns an error for a log that is named twice, or beside a copy, because its requests would count twice.
func (m *merge) checkTwice(sources []Source) error {
	begins := make(map[string]string)
	for i, r := range m.all {
		for j := range i {
			if a, b := sources[i].info, sources[j].info; a != nil && b != nil && os.SameFile(a, b) {
				other := m.all[j].name
				return fmt.Errorf("%w: %s and %s are the same file; name it once", ErrInvalidConfig, other, r.name)
			}
		}
		begin, err := r.text.Peek(sameBegin)
		if err != nil {
			continue // a short log, or the next read returns the error
		}
		if other, is := begins[string(begin)]; is {
			return fmt.Errorf("%w: %s and %s begin with the same %d bytes, so one is a copy; name one of them",
				ErrInvalidConfig, other, r.name, sameBegin)
		}
		begins[string(bytes.Clone(begin))] = r.name
	}
	return nil
}

// begin reads the first line of each source.
func (m *merge) begin(ctx context.Context) error {
	for _, r := range m.all {
		for r.latest.IsZero() {
			err := m.read(ctx, r)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
		}
		if !r.latest.IsZero() {
			heap.Push(oldest{m}, r)
		}
	}
	return nil
}

// next returns the next line in the order of time, valid until the next call. At the end of all sources it returns
// io.EOF.
func (m *merge) next(ctx context.Context) (*held, error) {
	for len(m.open) > 0 && m.size <= maxHeld {
		r := m.open[0]
		if len(m.held) > 0 && m.held[0].record.at.Before(r.latest.Add(-m.window)) {
			break
		}
		switch err := m.read(ctx, r); {
		case errors.Is(err, io.EOF):
			heap.Pop(oldest{m})
		case err != nil:
			return nil, err
		default:
			heap.Fix(oldest{m}, 0)
		}
	}
	if len(m.held) == 0 {
		return nil, io.EOF
	}
	h, _ := heap.Pop(&m.held).(*held)
	m.size -= h.size
	m.decided, m.spare = h.record.at, append(m.spare, h)
	return h, nil
}

// read reads a line of r, and holds it if it can be read.
func (m *merge) read(ctx context.Context, r *reader) error {
	if m.reads%checkEvery == 0 && ctx.Err() != nil {
		return fmt.Errorf("simulate: %w", ctx.Err())
	}
	m.reads++
	line, err := r.next()
	switch {
	case errors.Is(err, errTooLong):
		m.skip(r, err)
		return nil
	case errors.Is(err, io.EOF):
		return io.EOF
	case err != nil:
		return fmt.Errorf("simulate: %s: %w", r.name, err)
	case len(line) == 0:
		return nil
	}
	h := m.line()
	h.source, h.number, h.size = r, r.number, len(line)+heldSize
	if err := r.parser.parse(string(line), &h.record); err != nil {
		m.spare = append(m.spare, h)
		m.skip(r, err)
		return nil
	}
	at := h.record.at
	if at.Before(m.decided) {
		return m.late(ctx, h)
	}
	m.noteStep(r, at)
	heap.Push(&m.held, h)
	m.size += h.size
	return nil
}

// heldSize is the size of a held line beside its text.
const heldSize = 300

// line returns a held line for reuse.
func (m *merge) line() *held {
	if n := len(m.spare) - 1; n >= 0 {
		h := m.spare[n]
		m.spare = m.spare[:n]
		return h
	}
	return &held{record: record{fields: make(map[string]string)}}
}

// skip counts a line that cannot be read.
func (m *merge) skip(r *reader, err error) {
	m.report.Lines++
	m.report.Unparsed.add(r.name, r.number, err)
	r.invalid.add(r.name, r.number, err)
}

// noteStep counts a line that is earlier than a line above.
func (m *merge) noteStep(r *reader, at time.Time) {
	if back := r.latest.Sub(at); !r.latest.IsZero() && back > 0 {
		m.report.OutOfOrder++
		m.report.StepBackUs = max(m.report.StepBackUs, back.Microseconds())
		return
	}
	r.latest = at
}

// late returns the error for a line that is earlier than a decided line. It reads the rest of the source, to name a
// window that is enough.
func (m *merge) late(ctx context.Context, h *held) error {
	r, back := h.source, h.source.latest.Sub(h.record.at)
	place := fmt.Sprintf("line %d of %s has the time %s, which is %s before a line above it, and lines may be %s late",
		h.number, r.name, h.record.at.Format(time.RFC3339), back, m.window)
	for ctx.Err() == nil {
		line, err := r.next()
		if err != nil && !errors.Is(err, errTooLong) {
			break
		}
		if r.parser.parse(string(line), &h.record) == nil {
			back = max(back, r.latest.Sub(h.record.at))
			r.latest = later(r.latest, h.record.at)
		}
	}
	larger := fmt.Sprintf("set the window to %s or more", back.Truncate(time.Second)+time.Second)
	if back <= m.window {
		larger = fmt.Sprintf("leave lines out, because those of %s need more than %d MiB", m.window, maxHeld>>20)
	}
	return fmt.Errorf("%w: %s; pass rotated files and the logs of several servers as files of their own, "+
		"because files are merged by time; sort any other log by time, or %s", ErrOutOfOrder, place, larger)
}

// later returns the later of two times.
func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// close closes all sources.
func (m *merge) close() error {
	var errs []error
	for _, r := range m.all {
		errs = append(errs, r.close())
	}
	return errors.Join(errs...)
}
