package rules

import (
	"errors"
	"time"
)

// Pause is a time in which a key, or all keys of a limit, are given nothing: Take and Check refuse until its end, and
// what is reserved is ready no earlier. It begins as soon as a program hears of it, unless [Edit.From] says later. Of a
// pause of the limit and one of the key, the one that ends later counts. A key or limit can have several pauses, one after
// the other. A new pause replaces the pauses that overlap with it, from its beginning on. Pauses at other times stay.
type Pause struct {
	// Limit is the limit's name.
	Limit string
	// Key is the key as stored; see [ratelimit.Limiter.StoredKey]. Empty: every bucket of the limit.
	Key string
	// Until is the end.
	Until time.Time
	// NoSooner has the pause end no sooner than one that it overlaps with or follows: they become one pause, which covers
	// both. One that begins no later and ends no sooner stays as it is, and nothing of this one is in the history. Defaults
	// to false: this one takes the place of the other. It is false in what Store.List and Store.History return.
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
