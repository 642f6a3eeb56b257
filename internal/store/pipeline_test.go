//go:build !generalpath

package store

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// errRecorded is what a recorder answers.
var errRecorded = errors.New("recorded")

// recorder is a Conn that collects statements, to send them to a server with many others in one round trip.
type recorder struct{ sent []*pgx.QueuedQuery }

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

// answeredBy are the results of a batch of which one is at hand.
type answeredBy struct {
	pgx.BatchResults
	rows pgx.Rows
}

func (r answeredBy) Query() (pgx.Rows, error) { return r.rows, nil }

// attempting is an Owner that makes each attempt once. Its transactions are the ones in which the recorder's statements are sent.
type attempting struct{}

func (o attempting) InOwnTx(_ context.Context, from *Session, fn func(tx *Session) error) error {
	tx := from.BoundTo(from.conn, o)
	return fn(&tx)
}

func (attempting) Retry(_ context.Context, _ string, err error, _ func() error) error { return err }
func (attempting) Mended(context.Context, string)                                     {}
func (attempting) Batched(context.Context, int, time.Duration)                        {}

// pipeline sends the statements of a history, hundreds in a round trip, and compares each answer with the answer of the algebra in
// Go. A Session produces the statements and their parameters; it talks to the recorder.
type pipeline struct {
	t        *testing.T
	conn     Conn // of the server
	recorder *recorder
	session  Session
	batch    *pgx.Batch
	fixed    int // calls after which a wrong clock was corrected
}

// newPipeline returns a pipeline whose session is on the connection's own transactions, or in the current transaction of the
// connection.
func newPipeline(t *testing.T, conn Conn, inTx bool, asOf func() *int64) *pipeline {
	t.Helper()
	p := &pipeline{t: t, conn: conn, recorder: &recorder{}, batch: &pgx.Batch{}}
	if store := New(Options{Schema: DefaultSchema, AsOf: asOf}); inTx {
		p.session = store.InTx(p.recorder, attempting{}, nil)
	} else {
		p.session = store.OnPool(p.recorder, attempting{})
	}
	return p
}

// Take queues the statements that take from the buckets and, if necessary, correct a wrong clock.
func (p *pipeline) Take(asks []bucket.Ask, found []*bucket.State, expected []bucket.Answer) []bool {
	allowed := bucket.AllAllowed(expected)
	if !allowed && len(asks) > 1 && p.session.mode == alone { // the answer is the rows as they were found
		expected = slices.Clone(expected)
		for i := range expected {
			expected[i].State = stateOf(&asks[i], found[i], expected[i].Now)
		}
	}
	require.ErrorIs(p.t, p.session.takeByStatement(p.t.Context(), &Call{by: postgres{}, Question: Question{Asks: asks}, takes: asks}), errRecorded)
	if len(asks) == 1 || p.session.mode != alone {
		p.queue(sameAnswers(asks, expected))
	} else {
		p.queue(sameCluster(asks, expected))
	}
	if !allowed {
		if len(asks) > 1 && p.session.mode != alone {
			require.NoError(p.t, postgres{}.Undo(p.t.Context(), &p.session.Unit, nil))
			p.queue(nil)
		}
	}
	clocksFixed := p.fixClocks(asks, found, expected)
	if p.batch.Len() > 500 {
		p.flush()
	}
	return clocksFixed
}

// fixClocks queues what a Session sends after a refusal: nothing, unless that shows rows from the future. Then it locks these,
// which must be as in the history, and saves them with their clocks corrected. It returns which rows they are.
func (p *pipeline) fixClocks(asks []bucket.Ask, found []*bucket.State, answers []bucket.Answer) []bool {
	wrong := make([]bool, len(asks))
	if bucket.AllAllowed(answers) {
		return wrong
	}
	var rows []bucket.Ask
	var states []bucket.State
	for i := range asks {
		if wrong[i] = asks[i].FromFuture(answers[i]); wrong[i] {
			rows, states = append(rows, asks[i]), append(states, *found[i])
		}
	}
	err := p.session.fixClocks(p.t.Context(), asks, answers)
	if len(rows) == 0 {
		require.NoError(p.t, err)
		return wrong
	}
	require.ErrorIs(p.t, err, errRecorded)
	page := bucket.NewPage(rows)
	page.Now = answers[0].Now
	for i := range rows {
		page.Put(i, states[i], false)
	}
	p.queue(sameLockedRows(rows, states, page.Now))
	page.FixClocks()
	fixed := 0
	page.Changes(func(bucket.Key, bucket.State) { fixed++ }, nil)
	require.Len(p.t, rows, fixed)
	p.session.queueSave(p.batch, page)
	p.fixed++
	return wrong
}

// Look queues what reads the buckets.
func (p *pipeline) Look(asks []bucket.Ask, found []*bucket.State) {
	_, err := p.session.Look(p.t.Context(), asks, nil)
	require.ErrorIs(p.t, err, errRecorded)
	p.queue(sameRows(asks, found))
}

// Plant queues the writing of a row behind the session's back.
func (p *pipeline) Plant(row bucket.Key, state bucket.State) {
	p.batch.Queue(`INSERT INTO ratelimit.buckets (name, key, shard, value, ts) VALUES ($1, $2, $3, $4, $5)
		ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts`,
		row.Name, row.Key, row.Shard, state.Value, state.TS)
}

// queue moves the recorded statements to the batch; check is for the answer of the last one.
func (p *pipeline) queue(check func(pgx.Rows) error) {
	for i, sent := range p.recorder.sent {
		// Concurrent histories may wait for each other to extend the table. A call in a transaction of its own would be retried then.
		queued := p.batch.Queue(strings.ReplaceAll(sent.SQL, "'2ms'", "'10min'"), sent.Arguments...)
		if check != nil && i == len(p.recorder.sent)-1 {
			queued.Query(check)
		}
	}
	p.recorder.sent = nil
}

// flush sends the queue and checks the answers.
func (p *pipeline) flush() {
	p.t.Helper()
	require.NoError(p.t, p.conn.SendBatch(p.t.Context(), p.batch).Close())
	p.batch = &pgx.Batch{}
}

// stateOf returns the row, or what no row means.
func stateOf(a *bucket.Ask, found *bucket.State, now int64) bucket.State {
	if found == nil {
		return a.Terms.Full(now)
	}
	return *found
}

// sameAnswers returns a check that the answers of a statement equal expected, to the last bit.
func sameAnswers(asks []bucket.Ask, expected []bucket.Answer) func(pgx.Rows) error {
	return sameAs(asks, expected, func(rows pgx.Rows) ([]bucket.Answer, error) { return scanAnswers(rows, nil) })
}

// sameCluster is sameAnswers for the statement that takes for clusters.
func sameCluster(asks []bucket.Ask, expected []bucket.Answer) func(pgx.Rows) error {
	return sameAs(asks, expected, func(found pgx.Rows) ([]bucket.Answer, error) {
		answers, v, err := scanCluster(found, asks)
		if err == nil && v == undecided && verdictOn(asks, answers) != undecided {
			err = errors.New("the statement did not decide")
		}
		return answers, err
	})
}

// sameAs returns a check that the answers that scan reads equal expected, to the last bit.
func sameAs(asks []bucket.Ask, expected []bucket.Answer, scan func(pgx.Rows) ([]bucket.Answer, error)) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		got, err := scan(rows)
		if err != nil {
			return err
		}
		same := func(a, b bucket.Answer) bool {
			return a.Allowed == b.Allowed && sameState(a.State, b.State) && a.Now == b.Now
		}
		if !slices.EqualFunc(got, expected, same) {
			return fmt.Errorf("%+v:\nthe server answered %+v\nGo says             %+v", asks, got, expected)
		}
		return nil
	}
}

// sameState reports whether two states are the same to the last bit.
func sameState(a, b bucket.State) bool {
	return a == b && math.Float64bits(a.Value) == math.Float64bits(b.Value)
}

// sameRows returns a check that the rows read are those found, to the last bit.
func sameRows(asks []bucket.Ask, found []*bucket.State) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		got, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*bucket.State, error) {
			var value *float64
			var ts *int64
			if err := row.Scan(&value, &ts, nil, nil, nil); err != nil || value == nil {
				return nil, err
			}
			return &bucket.State{Value: *value, TS: *ts}, nil
		})
		if err == nil && !reflect.DeepEqual(got, found) {
			err = fmt.Errorf("%+v: the server has %+v, Go has %+v", asks, got, found)
		}
		return err
	}
}

// sameLockedRows returns a check that a statement locked all of the rows, with these states.
func sameLockedRows(asks []bucket.Ask, states []bucket.State, now int64) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		got := bucket.NewPage(asks)
		if err := receiveLocked(answeredBy{rows: rows}, got); err != nil {
			return err
		}
		same := got.IsComplete() && got.Now == now
		for i := range asks {
			same = same && sameState(got.State(&asks[i]), states[i])
		}
		if !same {
			return fmt.Errorf("%+v: the server locked %+v, Go has %+v", asks, got, states)
		}
		return nil
	}
}
