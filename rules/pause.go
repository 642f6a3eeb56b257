package rules

import (
	"errors"
	"time"
)

// Pause stops a key, or all keys of a limit, for a time: Take and Check refuse until its end, and reservations are
// ready no earlier. It begins as soon as a program is notified, unless [Edit.From] is later. If both the limit and the
// key are paused, the later end counts. There can be several pauses, one after the other. A new one replaces those that
// overlap with it, from its beginning on.
type Pause struct {
	// Limit is the limit's name.
	Limit string
	// Key is the key as stored; see [ratelimit.Limiter.StoredKey]. Empty: every bucket of the limit.
	Key string
	// Until is the end.
	Until time.Time
	// NoSooner never shortens a pause that this one overlaps with or follows: the two become one, which covers both. If an
	// existing pause covers this one, nothing changes, and the history has no new entry. Defaults to false: this one
	// replaces the other. Store.List and Store.History return false.
	NoSooner bool
}

func (p *Pause) validate() error {
	err := checkBucket(p.Limit, p.Key)
	switch {
	case err != nil:
	case p.Until.IsZero():
		err = errors.New("it has no Until; say when it ends")
	default:
		err = checkInstant("Until", p.Until)
	}
	if err != nil {
		return invalid("pause of %.80q: %w", p.Limit, err)
	}
	return nil
}
