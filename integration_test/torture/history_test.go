//go:build unix

package torture_test

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
)

// outcome is how a call ended, as its caller knows.
type outcome string

const (
	begun   outcome = "begun"   // and not ended: the process was killed
	allowed outcome = "allowed" // the call did all of its work
	refused outcome = "refused"
	failed  outcome = "failed"  // nothing was done, as is promised of the error
	unknown outcome = "unknown" // done or not: the error leaves it open
)

// item holds the tokens that a call took from a bucket, or may have taken; below 0 it returned them.
type item struct {
	name, key string
	tokens    float64
	lo, hi    int64 // tokens were taken between these instants, in microseconds since 1970
}

// entry is a call: a line of the history, or two where a process may be killed, the first with the outcome begun.
type entry struct {
	begin, end int64 // by this machine's clock, which is the server's, too; in microseconds since 1970
	call       string
	verb, path string
	outcome    outcome
	times      int64 // how many calls the line stands for
	items      []item
	id         string // of a reservation
	note       string
}

// line returns the entry as it stands in the file.
func (e *entry) line() string {
	items := make([]string, len(e.items))
	for i, of := range e.items {
		items[i] = fmt.Sprintf("%s/%s=%v@%d..%d", of.name, of.key, of.tokens, of.lo, of.hi)
	}
	note := strings.NewReplacer("\t", " ", "\n", " ").Replace(e.note)
	return fmt.Sprintf("%d\t%d\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\n",
		e.begin, e.end, e.call, e.verb, e.path, e.outcome, e.times, strings.Join(items, ","), e.id, note)
}

// parse reads a line. The last line of a killed process may be cut off.
func parse(line string) (e entry, err error) {
	fields := strings.Split(line, "\t")
	if len(fields) != 10 {
		return e, fmt.Errorf("%d fields in %q", len(fields), line)
	}
	number := func(field string) (n int64) {
		n, wrong := strconv.ParseInt(field, 10, 64)
		err = errors.Join(err, wrong)
		return n
	}
	e = entry{
		begin: number(fields[0]), end: number(fields[1]), call: fields[2], verb: fields[3], path: fields[4],
		outcome: outcome(fields[5]), times: number(fields[6]), id: fields[8], note: fields[9],
	}
	if fields[7] == "" {
		return e, err
	}
	for text := range strings.SplitSeq(fields[7], ",") {
		bucket, rest, _ := strings.Cut(text, "=")
		tokens, span, _ := strings.Cut(rest, "@")
		lo, hi, _ := strings.Cut(span, "..")
		of := item{lo: number(lo), hi: number(hi)}
		of.name, of.key, _ = strings.Cut(bucket, "/")
		of.tokens, _ = strconv.ParseFloat(tokens, 64)
		e.items = append(e.items, of)
	}
	return e, err
}

// history is the file to which a process writes its calls.
type history struct {
	mu     sync.Mutex
	file   *os.File
	buffer *bufio.Writer // nil where each line has to be in the file before the call goes on
	lean   bool          // count refusals, and write no line for them

	counted map[[2]string]int64
}

const historyFiles = "calls-*.tsv"

// newHistory makes the file of a process. A mortal one may be killed.
func newHistory(directory, process string, mortal, lean bool) (*history, error) {
	file, err := os.Create(filepath.Join(directory, strings.Replace(historyFiles, "*", process, 1)))
	if err != nil {
		return nil, err
	}
	h := &history{file: file, lean: lean, counted: map[[2]string]int64{}}
	if !mortal {
		h.buffer = bufio.NewWriterSize(file, 1<<16)
	}
	return h, nil
}

func (h *history) write(e *entry) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lean && e.outcome == refused {
		h.counted[[2]string{e.verb, e.path}]++
		return nil
	}
	if h.buffer == nil {
		_, err := h.file.WriteString(e.line())
		return err
	}
	_, err := h.buffer.WriteString(e.line())
	return err
}

func (h *history) close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for of, times := range h.counted {
		e := entry{verb: of[0], path: of[1], outcome: refused, times: times}
		if _, err := h.buffer.WriteString(e.line()); err != nil {
			return err
		}
	}
	if h.buffer != nil {
		if err := h.buffer.Flush(); err != nil {
			return err
		}
	}
	return h.file.Close()
}

// readHistories returns the calls of all processes of a run. Of a call with two lines it returns the second.
func readHistories(directory string, each func(e entry)) error {
	paths, err := filepath.Glob(filepath.Join(directory, historyFiles))
	if err != nil {
		return err
	}
	if len(paths) == 0 {
		return fs.ErrNotExist
	}
	for _, path := range paths {
		if err := readHistory(path, each); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

func readHistory(path string, each func(e entry)) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	open := map[string]entry{}
	lines := bufio.NewReaderSize(file, 1<<16)
	for {
		line, err := lines.ReadString('\n')
		if err != nil { // the end, or a line whose process was killed in the middle of it
			break
		}
		e, err := parse(strings.TrimSuffix(line, "\n"))
		if err != nil {
			return err
		}
		if e.outcome == begun {
			open[e.call] = e
			continue
		}
		delete(open, e.call)
		each(e)
	}
	for _, e := range open {
		each(e)
	}
	return nil
}
