package recorded_test

import "fmt"

// subject is the mechanism that a history is about. A history uses that one, and what every limiter has: token buckets,
// windows, slots, reservations, rules without changes, pauses, transactions, clocks. So a change of one mechanism
// changes the answers of its own histories only.
type subject uint64

// The n-th history is about the subject n % subjects.
const (
	aboutPlain subject = iota
	aboutBorrow
	aboutUpTo
	aboutWait
	aboutModes
	aboutEras  // rules whose policy changes to another of its kind
	aboutKinds // and to another kind, also by a deployment
	_          // free; it was about prices that calls charged
	aboutShards
	aboutCalendar
	_ // free; it was about limits with a Prefetch
	aboutSimulation
	subjects
)

func subjectNames() [subjects]string {
	return [subjects]string{
		"plain", "borrow", "upto", "wait", "modes", "eras", "kinds", "", "shards", "calendar", "", "simulation",
	}
}

func (s subject) String() string { return subjectNames()[s] }

// isFree reports whether no histories are about the number of s.
func (s subject) isFree() bool { return s.String() == "" }

// subjectOf returns the subject of the n-th history.
func subjectOf(n uint64) subject { return subject(n % uint64(subjects)) }

// subjectNamed returns the subject of this name.
func subjectNamed(name string) (subject, error) {
	for i, one := range subjectNames() {
		if one == name {
			return subject(i), nil
		}
	}
	return 0, fmt.Errorf("there is no subject %q; they are %v", name, subjectNames())
}

// kindsOf returns the kinds of limits in the histories of s. A kind of its own is drawn as often as all others.
func (s subject) kindsOf() []int {
	plain := []int{kindTokens, kindFixed, kindSliding, kindSlots}
	own := map[subject]int{
		aboutShards: kindShards, aboutCalendar: kindCalendar,
	}
	if kind, has := own[s]; has {
		return append(plain, kind, kind, kind, kind)
	}
	return plain
}

// eras returns how many eras a rule may begin with, and whether changes add others.
func (s subject) eras() (most int, changes bool) {
	if s == aboutModes || s == aboutEras || s == aboutKinds || s == aboutShards {
		return 3, true
	}
	return 1, false
}

// ownerOf returns the one subject whose histories call a verb.
func ownerOf(verb string) (owner subject, owned bool) {
	owner, owned = map[string]subject{"TakeUpTo": aboutUpTo, "Wait": aboutWait}[verb]
	return owner, owned
}

// verbOf returns the verb to call in place of one that belongs to another subject.
func (s subject) verbOf(verb string) string {
	switch owner, owned := ownerOf(verb); {
	case !owned || owner == s:
		return verb
	case owner == aboutWait:
		return "Reserve"
	}
	return "Take"
}
