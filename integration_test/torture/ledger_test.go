//go:build unix

package torture_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// place is a bucket.
type place struct{ name, key string }

func (p place) String() string { return p.name + "/" + p.key }

// account is what the histories say of a bucket.
type account struct {
	at place
	// took is what calls outside of transactions took for certain; they may have taken up to more beyond that, or less.
	took, more, less float64
	admitted         []item // with returned tokens
	held             []item // slots, and when they were held for certain
}

// reserved is what the histories say of a reservation.
type reserved struct {
	acknowledged bool
	settled      bool
	cancelled    bool
	renewed      bool // or may be
	actual       []item
}

// ledger is what the histories say altogether.
type ledger struct {
	accounts     map[place]*account
	txs          map[string]*entry // transactions, by their call
	reservations map[string]*reserved

	outcomes map[outcome]int64
	allowed  map[string]int64 // decisions by their path
	refused  map[string]int64
	verbs    map[string]int64
}

func newLedger() *ledger {
	return &ledger{
		accounts: map[place]*account{}, txs: map[string]*entry{}, reservations: map[string]*reserved{},
		outcomes: map[outcome]int64{}, allowed: map[string]int64{}, refused: map[string]int64{}, verbs: map[string]int64{},
	}
}

// decides are the verbs that are answered with a decision.
var decides = map[string]bool{
	"take": true, "takeUpTo": true, "borrow": true, "tx": true, "wait": true, "reserve": true, "acquire": true, "look": true, "require": true, "hold": true,
}

func (l *ledger) account(of item) *account {
	at := place{of.name, of.key}
	if l.accounts[at] == nil {
		at = place{strings.Clone(of.name), strings.Clone(of.key)} // without the line that they are parts of
		l.accounts[at] = &account{at: at}
	}
	return l.accounts[at]
}

// add enters a call.
func (l *ledger) add(e entry) {
	l.outcomes[e.outcome] += e.times
	l.verbs[e.verb] += e.times
	if decides[e.verb] {
		path := e.path
		if e.verb == "tx" {
			path = "tx " + path
		}
		switch e.outcome {
		case allowed:
			l.allowed[path] += e.times
		case refused:
			l.refused[path] += e.times
		default: // no decision
		}
	}
	switch {
	case e.verb == "tx":
		l.txs[e.call] = &e
		for id := range strings.FieldsSeq(e.id) {
			if e.outcome == allowed {
				l.reservation(id).acknowledged = true
			}
		}
	case e.verb == "held":
		a := l.account(e.items[0])
		a.held = append(a.held, e.items[0])
	case e.id != "":
		l.addReservation(e)
	default:
		l.addItems(e)
	}
}

func (l *ledger) addItems(e entry) {
	for _, of := range e.items {
		a := l.account(of)
		of.name, of.key = a.at.name, a.at.key
		certain := e.outcome == allowed
		if e.outcome == begun {
			of.lo, of.hi = e.begin, forever
		}
		if e.outcome == begun && e.verb == "wait" { // Expire returns its reserved tokens
			back := of
			back.tokens = -of.tokens
			a.admitted = append(a.admitted, back)
		}
		switch {
		case certain:
			a.took += of.tokens
			a.admitted = append(a.admitted, of)
		case of.tokens < 0:
			a.less -= of.tokens
			a.admitted = append(a.admitted, of)
		default:
			a.more += of.tokens
		}
	}
}

func (l *ledger) reservation(id string) *reserved {
	if l.reservations[id] == nil {
		l.reservations[id] = &reserved{}
	}
	return l.reservations[id]
}

func (l *ledger) addReservation(e entry) {
	r := l.reservation(e.id)
	certain := e.outcome == allowed
	switch e.verb {
	case "reserve":
		r.acknowledged = r.acknowledged || certain
		l.addItems(e)
	case "settle":
		if e.outcome != failed {
			r.actual = e.items
		}
		r.settled = certain
	case "cancel":
		r.cancelled = certain
	case "renew":
		r.renewed = e.outcome != failed
	}
}

// report returns the counts of calls, in lines.
func (l *ledger) report() (lines []string) {
	var allowedAll, refusedAll int64
	for _, path := range slices.Sorted(maps.Keys(l.allowed)) {
		lines = append(lines, fmt.Sprintf("  %-16s %9d allowed %9d refused", path, l.allowed[path], l.refused[path]))
		allowedAll, refusedAll = allowedAll+l.allowed[path], refusedAll+l.refused[path]
	}
	head := fmt.Sprintf("%d decisions: %d allowed, %d refused; calls: %d failed, %d unknown, %d cut off by a kill",
		allowedAll+refusedAll, allowedAll, refusedAll, l.outcomes[failed], l.outcomes[unknown], l.outcomes[begun])
	lines = append([]string{head}, lines...)
	var verbs []string
	for _, verb := range slices.Sorted(maps.Keys(l.verbs)) {
		verbs = append(verbs, fmt.Sprintf("%s %d", verb, l.verbs[verb]))
	}
	return append(lines, "  calls by verb: "+strings.Join(verbs, ", "))
}
