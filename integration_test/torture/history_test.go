//go:build unix

package torture_test

import (
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
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

// place is a bucket.
type place struct{ Name, Key string }

func (p place) String() string { return p.Name + "/" + p.Key }

// item holds the tokens that a call took from a bucket, or may have taken; below 0 it returned them. They were taken
// between two instants, in microseconds since 1970. Zeros mean the beginning and the end of the call.
type item struct {
	place

	Tokens float64
	Lo, Hi int64 `json:",omitempty"`
}

// forever is later than any run.
const forever = 1 << 60

// entry is a call: a line of the history, or two where a process may be killed, the first with the outcome begun.
type entry struct {
	Begin, End int64 // by this machine's clock, which is the server's, too; in microseconds since 1970
	Call       string
	Verb, Path string
	Outcome    outcome
	Items      []item `json:",omitempty"` // unless it is allowed: the most that the call may have taken
	ID         string `json:",omitempty"` // of a reservation
	Note       string `json:",omitempty"`
}

// history is the file to which a process writes its calls.
type history struct {
	mu   sync.Mutex
	file *os.File
}

const historyFiles = "calls-*.json"

func newHistory(directory, process string) (*history, error) {
	file, err := os.Create(filepath.Join(directory, strings.Replace(historyFiles, "*", process, 1)))
	return &history{file: file}, err
}

// write writes an entry at once, because the process may be killed.
func (h *history) write(e *entry) error {
	line, err := json.Marshal(e)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	_, err = h.file.Write(append(line, '\n'))
	return err
}

// account is what the histories say of a bucket.
type account struct {
	// took is what calls outside of transactions took for certain; they may have taken up to more beyond that, or less.
	took, more, less float64
	admitted         []item // with returned tokens
	held             []item // slots, and when they were held for certain
}

// reserved is what the histories say of a reservation.
type reserved struct {
	acknowledged, settled, cancelled bool
	renewed                          bool // or may be
	actual                           []item
}

// ledger is what the histories say altogether.
type ledger struct {
	accounts     map[place]*account
	txs          map[string]*entry // transactions, by their call
	reservations map[string]*reserved
	counts       map[string]map[outcome]int // of calls, by verb
}

func newLedger() *ledger {
	return &ledger{map[place]*account{}, map[string]*entry{}, map[string]*reserved{}, map[string]map[outcome]int{}}
}

// read enters the calls of all processes of a run. Of a call with two lines the second counts.
func (l *ledger) read(directory string) error {
	paths, err := filepath.Glob(filepath.Join(directory, historyFiles))
	for _, path := range paths {
		err = errors.Join(err, l.readFile(path))
	}
	return err
}

func (l *ledger) readFile(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	open := map[string]entry{}
	for lines := json.NewDecoder(file); ; {
		var e entry
		err := lines.Decode(&e)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) { // the process was killed in the middle of a line
			break
		}
		if err != nil {
			return err
		}
		if e.Outcome == begun {
			open[e.Call] = e
			continue
		}
		delete(open, e.Call)
		l.add(e)
	}
	for _, e := range open {
		l.add(e)
	}
	return nil
}

// add enters a call.
func (l *ledger) add(e entry) {
	entered(l.counts, e.Verb, map[outcome]int{})[e.Outcome]++
	switch {
	case e.Verb == "tx":
		l.txs[e.Call] = &e
		for id := range strings.FieldsSeq(e.ID) {
			if e.Outcome == allowed {
				entered(l.reservations, id, &reserved{}).acknowledged = true
			}
		}
	case e.Verb == "held":
		a := l.account(e.Items[0].place)
		a.held = append(a.held, e.Items[0])
	case e.ID != "":
		l.addReservation(e)
	default:
		l.addItems(e)
	}
}

// entered returns the value of a key, which is fresh if the map has none.
func entered[K comparable, V any](m map[K]V, key K, fresh V) V {
	if _, ok := m[key]; !ok {
		m[key] = fresh
	}
	return m[key]
}

func (l *ledger) account(at place) *account { return entered(l.accounts, at, &account{}) }

func (l *ledger) addItems(e entry) {
	if e.Outcome == refused {
		return
	}
	for _, of := range e.Items {
		a := l.account(of.place)
		if e.Outcome == allowed {
			of.Lo = cmp.Or(of.Lo, e.Begin)
			of.Hi = cmp.Or(of.Hi, max(e.End, of.Lo))
			a.took += of.Tokens
			a.admitted = append(a.admitted, of)
			continue
		}
		of.Lo, of.Hi = e.Begin, forever // the tokens may be taken or returned at any time from now on
		if e.Verb == "wait" {           // its reserved tokens are returned, at once or by Expire, while the callers behind it keep their time
			back := of
			back.Tokens = -of.Tokens
			a.admitted = append(a.admitted, back)
		}
		switch {
		case e.Outcome == failed:
		case of.Tokens < 0:
			a.less -= of.Tokens
			a.admitted = append(a.admitted, of)
		default:
			a.more += of.Tokens
		}
	}
}

func (l *ledger) addReservation(e entry) {
	r := entered(l.reservations, e.ID, &reserved{})
	certain := e.Outcome == allowed
	switch e.Verb {
	case "reserve":
		r.acknowledged = r.acknowledged || certain
		l.addItems(e)
	case "settle":
		if e.Outcome != failed {
			r.actual = e.Items
		}
		r.settled = certain
	case "cancel":
		r.cancelled = certain
	case "renew":
		r.renewed = e.Outcome != failed
	}
}
