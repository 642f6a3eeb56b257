package denials

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	flushEvery   = 10 * time.Second
	flushTimeout = time.Second // of the statement, and
	flushGrace   = time.Second // for a connection, and for the answer
)

// The statements, for the default schema.
var (
	//go:embed sql/denials_add.sql
	addSQL string
	//go:embed sql/denials_top.sql
	topSQL string
	//go:embed sql/denials_prune.sql
	pruneSQL string
)

// statements are the SQL texts for one schema.
type statements struct{ add, top, prune string }

func newStatements(schema string) statements {
	in := strings.NewReplacer("ratelimit.denials", pgx.Identifier{schema, "denials"}.Sanitize()).Replace
	return statements{add: in(addSQL), top: in(topSQL), prune: in(pruneSQL)}
}

// Run writes what was counted every ten seconds until ctx ends, then a last time, and returns the error of that. Each time
// is one statement, which adds up with those of other processes; around the turn of a minute, and after an outage, it is
// one for each minute. It has a connection of the pool meanwhile, and a second's
// time, and one more to get the connection.
//
// When it fails, counting goes on, and the next one writes what this one did not. Where an error leaves open whether
// it was written, as a connection that breaks does, it is not written again, so that nothing is counted twice; see
// [Counter.Dropped]. A key is told apart at the end of its minute, and the heaviest ones sooner; what it was refused is
// under the empty key until then. A process that dies leaves it there, and loses up to ten seconds.
func (c *Counter) Run(ctx context.Context) error {
	ticker := time.NewTicker(c.every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return c.flush(context.WithoutCancel(ctx), true)
		case <-ticker.C:
			if err := c.flush(context.WithoutCancel(ctx), false); err != nil { // cut off, nobody knew whether it was written
				c.config.Logger.WarnContext(ctx, "ratelimit: denials are not written",
					"error", telemetry.ErrorText(err), "dropped", c.Dropped())
			}
		}
	}
}

// flush writes what was counted. With last the keys of every minute are written.
func (c *Counter) flush(ctx context.Context, last bool) error {
	c.flushing.Lock()
	defer c.flushing.Unlock()
	minutes, over := c.over()
	if last {
		over = len(minutes)
	}
	for i, m := range minutes {
		if err := c.write(ctx, m, i < over); err != nil {
			return fmt.Errorf("denials: write: %w", explain(err, c.config.Schema))
		}
	}
	return nil
}

// write writes what was counted of a minute, for the last time with its keys when it is over.
func (c *Counter) write(ctx context.Context, m *minute, isOver bool) error {
	rows := m.collect(isOver)
	isUndone, err := c.add(ctx, m.startUs, rows)
	switch {
	case err == nil && isOver:
		c.done(m)
	case err == nil:
	case !isUndone:
		m.forget()
		c.dropped.Add(refusedIn(rows))
	case !m.putBack(rows):
		c.dropped.Add(refusedIn(rows))
	}
	return err
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

// columns returns the rows of a minute as the parameters of denials_add.sql.
func columns(startUs int64, rows map[id]tally) []any {
	var (
		names, routes, keys = make([]string, 0, len(rows)), make([]string, 0, len(rows)), make([]string, 0, len(rows))
		shadows             = make([]bool, 0, len(rows))
		refused, last       = make([]int64, 0, len(rows)), make([]int64, 0, len(rows))
		costs               = make([]float64, 0, len(rows))
	)
	for of, t := range rows {
		names, routes, keys = append(names, of.limit), append(routes, of.route), append(keys, of.key)
		shadows, refused = append(shadows, of.shadow), append(refused, t.refused)
		costs, last = append(costs, t.cost), append(last, t.lastUs)
	}
	return []any{time.UnixMicro(startUs), names, routes, keys, shadows, refused, costs, last}
}

// explain adds to err what to do about it.
func explain(err error, schema string) error {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return err
	}
	switch pgErr.Code {
	case "42P01", "3F000": // there is no such table, or schema
		return fmt.Errorf("%w (schema %q): %w", ratelimit.ErrNotMigrated, schema, err)
	case "42501":
		return fmt.Errorf("%w; the role needs USAGE on schema %q, and SELECT, INSERT, UPDATE and DELETE on its table denials: migrations.Grants has the statements", err, schema)
	}
	return err
}
