package refusals

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
)

const (
	flushEvery   = time.Second
	flushTimeout = time.Second // of the statement, and
	flushGrace   = time.Second // for a connection, and for the answer

	privileges = "USAGE, and SELECT, INSERT, UPDATE and DELETE on its table refusals"
)

// The statements, for the default schema.
var (
	//go:embed sql/add.sql
	addSQL string
	//go:embed sql/top.sql
	topSQL string
	//go:embed sql/prune.sql
	pruneSQL string
)

// statements are the SQL texts for one schema.
type statements struct{ add, top, prune string }

func newStatements(schema string) statements {
	in := strings.NewReplacer("ratelimit.refusals", pgx.Identifier{schema, "refusals"}.Sanitize()).Replace
	return statements{add: in(addSQL), top: in(topSQL), prune: in(pruneSQL)}
}

// Run writes the counts each second until ctx ends, then a last time, and returns the error of that. Each write is one
// statement for each minute with refusals, on a connection of the pool, with a timeout of a second. Counts of several
// processes add up.
//
// If a write fails, counting goes on and the next write includes the rows. If an error leaves open whether the rows
// were written, for example because the connection broke, they are not written again. So nothing is counted twice; see
// [Counter.Dropped]. The keys of a minute get their rows when it is over, the heaviest ones sooner. Until then their
// refusals are in the row with the empty key. A process that dies leaves them there, and loses up to a second.
func (c *Counter) Run(ctx context.Context) error {
	if err := checkContext(ctx, "run"); err != nil {
		return err
	}
	ticker := time.NewTicker(c.every)
	defer ticker.Stop()
	var failures telemetry.FailureLog
	for {
		select {
		case <-ctx.Done():
			return c.flush(context.WithoutCancel(ctx), true)
		case <-ticker.C:
			if err := c.flush(context.WithoutCancel(ctx), false); err != nil { // if ctx cut it off, the outcome would be unknown
				failures.Failed(ctx, c.config.Logger, slog.LevelWarn, "ratelimit: refusals are not written", err,
					slog.Int64("dropped", c.Dropped()))
				continue
			}
			failures.Worked(ctx, c.config.Logger, "ratelimit: refusals are written again")
		}
	}
}

// flush writes the counts. If last, it also writes the keys of every minute.
func (c *Counter) flush(ctx context.Context, last bool) error {
	c.flushing.Lock()
	defer c.flushing.Unlock()
	c.mu.Lock()
	minutes := slices.Clone(c.minutes)
	c.mu.Unlock()
	for _, m := range minutes {
		rows := c.collect(m, last)
		isUndone, err := c.add(ctx, m.startUs, rows)
		if err != nil {
			c.keep(m, rows, isUndone)
			return fmt.Errorf("refusals: write: %w", pgerr.Explain(err, c.config.Schema, privileges))
		}
	}
	return nil
}

// collect returns the rows of a minute to write. If the minute is over, it counts no more keys, and ends once it has no
// rows.
func (c *Counter) collect(m *minute, last bool) map[id]tally {
	c.mu.Lock()
	defer c.mu.Unlock()
	isOver := c.now().Sub(m.opened) >= longest
	rows := m.collect(isOver || last)
	if isOver {
		m.keys, m.allowed = heaviest{}, heaviest{}
	}
	if isOver && len(rows) == 0 {
		c.minutes = slices.DeleteFunc(c.minutes, func(o *minute) bool { return o == m })
		c.doneUs = max(c.doneUs, m.startUs)
	}
	return rows
}

// keep keeps rows that were not written. It drops them if the minute was dropped, or if they may have been written.
func (c *Counter) keep(m *minute, rows map[id]tally, isUndone bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if isUndone && slices.Contains(c.minutes, m) {
		m.undone = rows
		return
	}
	m.forget()
	c.dropped += refusedIn(rows)
}

// add adds rows to the table. isUndone is whether an error is known to have written nothing.
func (c *Counter) add(ctx context.Context, startUs int64, rows map[id]tally) (isUndone bool, err error) {
	if len(rows) == 0 {
		return false, nil
	}
	// The server ends the statement first, so that its outcome is known.
	ctx, cancel := context.WithTimeout(ctx, c.timeout+c.grace)
	defer cancel()
	conn, err := c.pool.Acquire(ctx)
	if err != nil {
		return true, err
	}
	defer conn.Release()
	batch := &pgx.Batch{} // one transaction, and one round trip
	batch.Queue("SELECT set_config('statement_timeout', $1, true)", fmt.Sprint(c.timeout.Milliseconds()))
	batch.Queue(c.sql.add, columns(startUs, rows)...)
	err = conn.SendBatch(ctx, batch).Close()
	return wroteNothing(err), err
}

// wroteNothing reports whether a batch that failed with err was not sent, or was undone by the server.
func wroteNothing(err error) bool {
	var pgErr *pgconn.PgError
	var unsent pgx.ErrPreprocessingBatch
	return errors.As(err, &unsent) || errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR"
}

// columns returns the rows of a minute as the parameters of sql/add.sql.
func columns(startUs int64, rows map[id]tally) []any {
	var (
		names, routes, keys = make([]string, 0, len(rows)), make([]string, 0, len(rows)), make([]string, 0, len(rows))
		decided             = make([]string, 0, len(rows))
		shadows             = make([]bool, 0, len(rows))
		refused, last       = make([]int64, 0, len(rows)), make([]int64, 0, len(rows))
		allowed             = make([]int64, 0, len(rows))
		costs               = make([]float64, 0, len(rows))
	)
	for of, t := range rows {
		names, routes, keys = append(names, of.limit), append(routes, of.route), append(keys, of.key)
		shadows, refused = append(shadows, of.shadow), append(refused, t.refused)
		costs, last, allowed = append(costs, t.cost), append(last, t.lastUs), append(allowed, t.allowed)
		decided = append(decided, t.rule)
	}
	return []any{time.UnixMicro(startUs), names, routes, keys, shadows, refused, costs, last, allowed, decided}
}
