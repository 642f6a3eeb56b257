package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// errRecorded is what a recorder answers.
var errRecorded = errors.New("recorded")

// recorder is a DB that keeps what it is sent, to be sent to a server with much else in one round trip.
type recorder struct {
	Pool
	sent []*pgx.QueuedQuery
}

func (r *recorder) Exec(_ context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	r.sent = append(r.sent, &pgx.QueuedQuery{SQL: sql, Arguments: args})
	return pgconn.CommandTag{}, nil
}

func (r *recorder) Query(_ context.Context, sql string, args ...any) (pgx.Rows, error) {
	r.sent = append(r.sent, &pgx.QueuedQuery{SQL: sql, Arguments: args})
	return nil, errRecorded
}

func (r *recorder) SendBatch(_ context.Context, batch *pgx.Batch) pgx.BatchResults {
	r.sent = append(r.sent, batch.QueuedQueries...)
	return recordedResults{}
}

// recordedResults are the results of a batch that was only recorded.
type recordedResults struct{ pgx.BatchResults }

func (recordedResults) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, errRecorded }
func (recordedResults) Query() (pgx.Rows, error)         { return nil, errRecorded }
func (recordedResults) Close() error                     { return nil }

// pipeline sends the statements of a history, hundreds in a round trip, and holds each answer to what the
// algebra in Go answered. The statements and their parameters are those of the limiter's own code.
type pipeline struct {
	t        *testing.T
	history  *history
	db       DB
	recorder *recorder
	batch    *pgx.Batch
}

// send queues what the limiter would send for a plan.
func (l *pipeline) send(p *plan, expected []answer, allowed bool) {
	ctx, limiter := l.t.Context(), l.history.limiter
	switch {
	case expected == nil:
		require.NoError(l.t, limiter.fill(ctx, p))
		l.queue(nil)
		return
	case expected[0].now == 0:
		l.plant(p.buckets[0].key, expected[0].state)
		return
	case len(p.buckets) > 1 && limiter.pool != nil && !allowed: // the answer is the rows as they were found
		expected = slices.Clone(expected)
		for i := range expected {
			expected[i].state = l.history.of(&p.buckets[i]).state(expected[i].now)
		}
	}
	_, err := limiter.run(ctx, p)
	require.ErrorIs(l.t, err, errRecorded)
	if p.free() {
		l.queue(l.sameRows(p))
		return
	}
	l.queue(l.sameAnswers(p, expected))
	if !allowed {
		if len(p.buckets) > 1 && limiter.pool == nil {
			l.batch.Queue("ROLLBACK TO SAVEPOINT " + savepoint)
			l.batch.Queue("RELEASE SAVEPOINT " + savepoint)
		}
		l.mend(p)
	}
	if l.batch.Len() > 500 {
		l.flush()
	}
}

// mend queues the statement that mends for every row of a plan; it must leave alone those that need it not.
func (l *pipeline) mend(p *plan) {
	suspects := make([]answer, len(p.buckets))
	for i := range suspects {
		suspects[i] = answer{state: bucket.State{TS: bucket.MinInstant}, now: l.history.now}
		if l.history.of(&p.buckets[i]).row != nil {
			suspects[i].state.TS = bucket.MaxInstant
		}
	}
	require.NoError(l.t, l.history.limiter.mend(l.t.Context(), p, suspects))
	l.queue(nil)
}

// queue moves what was recorded to the batch; check is for the answer of the last statement.
func (l *pipeline) queue(check func(pgx.Rows) error) {
	for i, sent := range l.recorder.sent {
		// Histories that run at the same time may wait for each other to make room in the table, for which a call of the
		// limiter's own would be made again.
		queued := l.batch.Queue(strings.ReplaceAll(sent.SQL, "'2ms'", "'10min'"), sent.Arguments...)
		if check != nil && i == len(l.recorder.sent)-1 {
			queued.Query(check)
		}
	}
	l.recorder.sent = nil
}

// plant queues the writing of a row behind the limiter's back.
func (l *pipeline) plant(key string, row bucket.State) {
	l.batch.Queue(`INSERT INTO ratelimit.buckets (name, key, shard, value, ts) VALUES ('history', $1, 0, $2, $3)
		ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts`, key, row.Value, row.TS)
}

// sameAnswers returns a check that a statement answered what was expected, to the last bit.
func (l *pipeline) sameAnswers(p *plan, expected []answer) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		got, err := scan(rows)
		if err != nil {
			return err
		}
		same := func(a, b answer) bool {
			return a.allowed == b.allowed && a.state == b.state && a.now == b.now && math.Float64bits(a.state.Value) == math.Float64bits(b.state.Value)
		}
		if !slices.EqualFunc(got, expected, same) {
			return fmt.Errorf("%+v:\nthe server answered %+v\nGo says             %+v", p.buckets, got, expected)
		}
		return nil
	}
}

// sameRows returns a check that the rows read are those of the history as of now, to the last bit.
func (l *pipeline) sameRows(p *plan) func(pgx.Rows) error {
	var expected []*bucket.State
	for i := range p.buckets {
		expected = append(expected, l.history.of(&p.buckets[i]).row)
	}
	return func(rows pgx.Rows) error {
		got, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*bucket.State, error) {
			var value *float64
			var ts *int64
			if err := row.Scan(&value, &ts, nil); err != nil || value == nil {
				return nil, err
			}
			return &bucket.State{Value: *value, TS: *ts}, nil
		})
		if err == nil && !reflect.DeepEqual(got, expected) {
			err = fmt.Errorf("%+v: the server has %+v, Go has %+v", p.buckets, got, expected)
		}
		return err
	}
}

// flush sends what is queued and checks the answers.
func (l *pipeline) flush() {
	l.t.Helper()
	results := l.db.SendBatch(l.t.Context(), l.batch)
	require.NoError(l.t, results.Close())
	l.batch = &pgx.Batch{}
}
