package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// ErrUnknownWindows says that a decision was made at an instant beyond the tables of its calendars, or in an era with another mode
// than the call was made for. It has taken nothing.
var ErrUnknownWindows = errors.New("ratelimit: the database's clock was changed: the call needs the calendars and the modes of rules at another instant")

// ZoneError says that the server knows no time zone of that name. A caller's transaction goes on.
type ZoneError struct{ Zone string }

func (e *ZoneError) Error() string { return fmt.Sprintf("there is no time zone %q", e.Zone) }

const (
	// calendarSavepoint is what a caller's transaction goes back to after a look at a calendar, whatever came of it.
	calendarSavepoint = "ratelimit_calendar"
	// calendarAge is after how long the server is asked again: it may have new time zone data.
	calendarAge = time.Hour
	// calendarAgain is after how long that is tried again when it failed.
	calendarAgain = time.Minute
	// maxCalendarTerms bounds the terms of which the eras are kept. Those that are forgotten are made again.
	maxCalendarTerms = 1024

	codeInvalidParameter = "22023"
)

// calendars keeps when windows begin, and the eras that terms with a calendar consist of. Equal terms get the same eras.
type calendars struct {
	mu     sync.RWMutex
	tables map[bucket.Calendar]*calendar
	eras   map[bucket.Terms]calendarEras
}

// calendar is what is known of one of them.
type calendar struct {
	of    bucket.Calendar
	busy  chan struct{} // holds a token while somebody asks the server on the pool
	known atomic.Pointer[knownTable]
}

// knownTable is a table, and when the server was asked.
type knownTable struct {
	table *bucket.Table
	ahead int64     // how far the database's clock is ahead of that of this process, in microseconds
	again time.Time // when to ask again
}

// calendarEras are eras, and the tables of the calendars that they were made from.
type calendarEras struct {
	eras   *bucket.Eras
	of     []*calendar
	tables []*bucket.Table
}

// now returns about what time it is for the database.
func (k *knownTable) now(local time.Time, asOf *int64) int64 {
	if asOf != nil {
		return *asOf
	}
	return local.UnixMicro() + k.ahead
}

// KnownOnCalendar is OnCalendar for terms of which all is known. It asks nobody.
func (s *Store) KnownOnCalendar(t bucket.Terms) (terms bucket.Terms, known bool) {
	made := s.calendars.made(keyOfEras(t))
	if made.eras == nil {
		return t, false
	}
	local, asOf, now := time.Now(), s.now(), int64(0)
	for i, c := range made.of {
		k := c.known.Load()
		if k == nil || k.table != made.tables[i] || !k.isFresh(c.of, local, asOf) {
			return t, false
		}
		now = k.now(local, asOf)
	}
	return t.Within(made.eras.Holding(now)), true
}

// OnCalendar returns terms that follow a calendar as those that hold now, which know when windows begin. It asks the server
// where that is not known, or was not asked for long: in the transaction of s, which stays usable. at is what time it is for
// the database; null: as far as this process knows. not are the terms of an ask that was answered with ErrUnknownWindows, whose tables are not
// to be used. It returns a ZoneError when the server does not know the zone.
func (s *Session) OnCalendar(ctx context.Context, t bucket.Terms, at *int64, not bucket.Terms) (bucket.Terms, error) {
	if at == nil {
		at = s.now()
	}
	key, of := keyOfEras(t), t.Calendars()
	made := s.calendars.made(key)
	next, now := calendarEras{of: make([]*calendar, len(of)), tables: make([]*bucket.Table, len(of))}, int64(0)
	for i := range of {
		c := s.calendars.entry(of[i])
		var spent *bucket.Table
		if made.eras != nil && made.eras == not.Eras {
			spent = made.tables[i]
		}
		known, err := s.known(ctx, c, at, spent)
		if err != nil {
			return bucket.Terms{}, err
		}
		next.of[i], next.tables[i], now = c, known.table, known.now(time.Now(), at)
	}
	return t.Within(s.calendars.make(key, next).Holding(now)), nil
}

// keyOfEras returns what the eras of terms are kept by: they are the same for all buckets and in each era of a rule.
func keyOfEras(t bucket.Terms) bucket.Terms {
	if t.Eras != nil {
		return bucket.Terms{Eras: t.Eras}
	}
	return t
}

// made returns the eras that were made of terms last.
func (c *calendars) made(key bucket.Terms) calendarEras {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.eras[key]
}

// make makes the eras of terms, or returns those that are there.
func (c *calendars) make(key bucket.Terms, next calendarEras) *bucket.Eras {
	c.mu.Lock()
	defer c.mu.Unlock()
	if made := c.eras[key]; made.eras != nil && slices.Equal(made.tables, next.tables) {
		return made.eras
	}
	next.eras = key.OnCalendar(func(of bucket.Calendar) *bucket.Table {
		return next.tables[slices.IndexFunc(next.of, func(c *calendar) bool { return c.of == of })]
	})
	if c.eras == nil || len(c.eras) >= maxCalendarTerms {
		c.eras = make(map[bucket.Terms]calendarEras)
	}
	c.eras[key] = next
	return next.eras
}

// entry returns what is known of a calendar.
func (c *calendars) entry(of bucket.Calendar) *calendar {
	c.mu.RLock()
	e := c.tables[of]
	c.mu.RUnlock()
	if e != nil {
		return e
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e = c.tables[of]; e != nil {
		return e
	}
	if c.tables == nil || len(c.tables) >= maxCalendarTerms {
		c.tables = make(map[bucket.Calendar]*calendar)
	}
	e = &calendar{of: of, busy: make(chan struct{}, 1)}
	c.tables[of] = e
	return e
}

// isUsable reports whether the table does for decisions now.
func (k *knownTable) isUsable(of bucket.Calendar, local time.Time, asOf *int64) bool {
	return k != nil && k.table.Covers(of, k.now(local, asOf))
}

// isFresh reports whether it is usable, and the server was asked lately.
func (k *knownTable) isFresh(of bucket.Calendar, local time.Time, asOf *int64) bool {
	return k.isUsable(of, local, asOf) && local.Before(k.again)
}

// known returns what is known of a calendar, and asks the server when that does not do, or is spent, or was long ago. On the
// pool one call asks for all that come meanwhile: they wait where nothing is known that does, and else go on with that. A
// transaction waits for no other call.
func (s *Session) known(ctx context.Context, c *calendar, asOf *int64, spent *bucket.Table) (*knownTable, error) {
	known := c.known.Load()
	if known.isFresh(c.of, time.Now(), asOf) && known.table != spent {
		return known, nil
	}
	does := known.isUsable(c.of, time.Now(), asOf) && known.table != spent
	if s.mode == alone {
		if isFirst, err := c.enter(ctx, does); err != nil {
			return nil, err
		} else if !isFirst {
			return known, nil
		}
		defer func() { <-c.busy }()
		if known = c.known.Load(); known.isFresh(c.of, time.Now(), asOf) && known.table != spent {
			return known, nil
		}
	}
	fresh, err := s.askCalendar(ctx, c.of)
	if err == nil {
		return c.learn(fresh), nil
	}
	var unknown *ZoneError
	if errors.As(err, &unknown) || !known.isUsable(c.of, time.Now(), asOf) || known.table == spent {
		return nil, err
	}
	later := *known // what is known still holds
	later.again = time.Now().Add(calendarAgain)
	c.known.CompareAndSwap(known, &later)
	if ctx.Err() != nil {
		return nil, err
	}
	return known, nil
}

// enter waits until nobody else asks the server. isFirst is false when somebody does, and hurried is set: then it does not
// wait.
func (c *calendar) enter(ctx context.Context, hurried bool) (isFirst bool, err error) {
	select {
	case c.busy <- struct{}{}:
		return true, nil
	default:
	}
	if hurried {
		return false, nil
	}
	select {
	case c.busy <- struct{}{}:
		return true, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// learn keeps a table. One that says the same as the one before leaves that in place, so that the eras stay the same.
func (c *calendar) learn(fresh *knownTable) *knownTable {
	if before := c.known.Load(); before != nil && before.table.Equal(fresh.table) {
		fresh.table = before.table
	}
	c.known.Store(fresh)
	return fresh
}

// askCalendar asks the server when the windows of a calendar begin.
func (s *Session) askCalendar(ctx context.Context, c bucket.Calendar) (known *knownTable, err error) {
	if s.memory != nil {
		return s.calendarOnEngine(c)
	}
	batch := &pgx.Batch{}
	if s.mode != alone {
		batch.Queue("SAVEPOINT " + calendarSavepoint)
	}
	before, after := c.Reach()
	batch.Queue(s.statements.calendarZone, c.Zone)
	batch.Queue(s.statements.calendarTable, c.Days(), c.Months(), c.Weekday, max(c.Month, 1), max(c.Day, 1), -before, after, s.now())
	unread := batch.Len() - 1
	if s.mode != alone {
		batch.Queue("ROLLBACK TO SAVEPOINT " + calendarSavepoint)
		batch.Queue("RELEASE SAVEPOINT " + calendarSavepoint)
	}
	err = s.send(ctx, batch, func(results pgx.BatchResults) error {
		if err := skip(results, unread); err != nil {
			return err
		}
		known, err = scanCalendar(results.QueryRow(), c)
		return err
	})
	if err == nil || s.mode == alone || SQLState(err) == "" {
		return known, zoneError(err, c)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), EndTimeout)
	defer cancel()
	const back = "ROLLBACK TO SAVEPOINT " + calendarSavepoint + "; RELEASE SAVEPOINT " + calendarSavepoint
	if _, undoErr := s.conn.Exec(ctx, back); undoErr != nil { // the transaction had failed before
		return nil, err
	}
	return nil, zoneError(err, c)
}

// zoneError returns a ZoneError for what a server says of a zone that it does not know, and every other err as it is.
func zoneError(err error, c bucket.Calendar) error {
	if SQLState(err) == codeInvalidParameter {
		return &ZoneError{c.Zone}
	}
	return err
}

// scanCalendar reads what calendar_table.sql answers.
func scanCalendar(row pgx.Row, c bucket.Calendar) (*knownTable, error) {
	var now, until int64
	var zone string
	var from, step []int64
	if err := row.Scan(&now, &zone, &from, &step, &until); err != nil {
		return nil, err
	}
	if !strings.EqualFold(zone, c.Zone) { // it was read as something else
		return nil, &ZoneError{c.Zone}
	}
	table := &bucket.Table{End: until, Runs: make([]bucket.Run, len(from))}
	for i := range from {
		table.Runs[i] = bucket.Run{From: from[i], Step: step[i]}
	}
	local := time.Now()
	known := &knownTable{table: table, ahead: now - local.UnixMicro(), again: local.Add(calendarAge)}
	if !table.Covers(c, now) {
		return nil, fmt.Errorf("the windows of the calendar begin from %d to %d, and it is %d", from[0], until, now)
	}
	return known, nil
}

// calendarText returns a calendar as a reservation keeps it, and "" for none.
func calendarText(c bucket.Calendar) string {
	if c.Unit == 0 {
		return ""
	}
	return fmt.Sprintf("%d %d %d %d %s", c.Unit, c.Weekday, c.Day, c.Month, c.Zone)
}

// calendarOf returns the calendar of such a text.
func calendarOf(text string) (c bucket.Calendar) {
	if _, err := fmt.Sscanf(text, "%d %d %d %d %s", &c.Unit, &c.Weekday, &c.Day, &c.Month, &c.Zone); err != nil {
		return bucket.Calendar{}
	}
	return c
}

// followedBy returns the calendars that the terms of the asks follow now, as a reservation keeps them: none when no terms do.
func followedBy(asks []bucket.Ask) []string {
	calendars := []string{}
	for i := range asks {
		if c := asks[i].Terms.Followed(); c.Unit != 0 {
			if len(calendars) == 0 {
				calendars = make([]string, len(asks))
			}
			calendars[i] = calendarText(c)
		}
	}
	return calendars
}

// calendarOnEngine says when the windows of a calendar begin by the time zone data of this program.
func (s *Session) calendarOnEngine(c bucket.Calendar) (*knownTable, error) {
	zone, err := time.LoadLocation(c.Zone)
	if err != nil {
		return nil, &ZoneError{c.Zone}
	}
	local, now := time.Now(), s.Instant()
	return &knownTable{table: c.LocalTable(zone, now), ahead: now - local.UnixMicro(), again: local.Add(calendarAge)}, nil
}
