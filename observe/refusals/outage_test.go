package refusals

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

var errAway = errors.New("the server is away")

// What cannot be written is written later, once, for five minutes. Then the oldest minute gives way, and is reported.
func TestAnOutage(t *testing.T) {
	t.Parallel()
	var isAway atomic.Bool
	b := setup(t, func(c *pgxpool.Config) {
		c.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
			if isAway.Load() {
				return false, errAway
			}
			return true, nil
		}
	})
	isAway.Store(true)
	const dropped = 7
	for n := range maxMinutes + dropped {
		at := noon.Add(time.Duration(n) * time.Minute)
		for range 3 {
			for key := range 200 {
				b.refuse(at, fmt.Sprint(key), 1)
			}
			require.ErrorIs(t, b.flush(t.Context(), false), errAway)
			b.pass(20 * time.Second)
		}
		require.EqualValues(t, max(n+1-maxMinutes, 0)*600, b.Dropped())
	}
	b.refuse(noon.Add(-time.Minute), "late", 1)
	require.EqualValues(t, dropped*600+1, b.Dropped(), "what is older than all that wait is not kept")
	isAway.Store(false)
	for range 2 {
		require.NoError(t, b.flush(t.Context(), true))
	}
	rows := b.rows(t)
	require.Equal(t, noon.Add(dropped*time.Minute), rows[0].Minute)
	require.EqualValues(t, maxMinutes*600, b.sum(t))
	for _, r := range rows {
		if r.ID.key != "" {
			require.EqualValues(t, 3, r.Refused, r)
		}
	}
	require.EqualValues(t, dropped*600+1, b.Dropped())
}

// A Counter that can write to nowhere costs bounded memory.
func TestWithoutADatabaseMemoryIsBounded(t *testing.T) { //nolint:paralleltest // what others allocate meanwhile would count
	closed, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/nothing")
	require.NoError(t, err)
	closed.Close()
	b := on(t, closed, Config{Keys: true})
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	const minutes, keys = 15, 20_000
	for n := range minutes {
		at := noon.Add(time.Duration(n) * time.Minute)
		for key := range keys {
			b.refuse(at, fmt.Sprintf("key of some %d bytes, as addresses have", key), 1)
		}
		b.pass(time.Minute)
		require.Error(t, b.flush(t.Context(), false))
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	grown := int64(after.HeapAlloc) - int64(before.HeapAlloc)
	t.Logf("%.1f MB for %d refusals", float64(grown)/1e6, minutes*keys)
	t.Run("Memory", func(t *testing.T) {
		testkit.Nightly(t, "the size of a heap depends on the machine")
		require.Less(t, grown, int64(maxMinutes*6e6))
	})
	require.EqualValues(t, (minutes-maxMinutes)*keys, b.Dropped())
}

// If the table is locked, the server cancels the statement, so it is known to have written nothing.
func TestATimeoutIsWrittenLater(t *testing.T) {
	t.Parallel()
	for name, isPrepared := range map[string]bool{"Preparing": false, "Prepared": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
			other, err := pgx.Connect(t.Context(), b.pool.Config().ConnString())
			require.NoError(t, err)
			defer func() { _ = other.Close(context.WithoutCancel(t.Context())) }()
			if isPrepared {
				b.refuse(noon, "mallory", 1)
				require.NoError(t, b.flush(t.Context(), true))
			}
			_, err = other.Exec(t.Context(), "BEGIN; LOCK TABLE ratelimit.refusals")
			require.NoError(t, err)
			if b.timeout = 50 * time.Millisecond; !isPrepared { // the client gives up first
				b.timeout, b.grace = patient, 500*time.Millisecond-patient
			}
			b.refuse(noon, "mallory", 3)
			err = b.flush(t.Context(), true)
			require.Error(t, err)
			require.Zero(t, b.Dropped(), err)
			var timeout *pgconn.PgError
			require.Equal(t, isPrepared, errors.As(err, &timeout) && timeout.Code == "57014", err)
			_, err = other.Exec(t.Context(), "COMMIT")
			require.NoError(t, err)
			b.timeout, b.grace = patient, patient
			require.NoError(t, b.flush(t.Context(), true))
			require.EqualValues(t, map[bool]int{false: 3, true: 4}[isPrepared], b.sum(t))
			require.Zero(t, b.Dropped())
			var left string
			require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT current_setting('statement_timeout')").Scan(&left))
			require.Equal(t, "0", left, "the timeout was for the one statement")
		})
	}
}

// deaf is a connection that drops all answers after a call of its switch.
type deaf struct {
	net.Conn
	is *atomic.Bool
}

func (c *deaf) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.is.Load() {
		_ = c.Close()
		return 0, net.ErrClosed
	}
	return n, err
}

// Counts that may have been written are not written again: they are in the table once, or they are lost and reported.
func TestALostAnswerIsNotCountedTwice(t *testing.T) {
	t.Parallel()
	var isDeaf atomic.Bool
	b := setup(t, func(c *pgxpool.Config) {
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
			return &deaf{conn, &isDeaf}, err
		}
		c.MaxConns = 1
	})
	b.refuse(noon, "mallory", 3)
	require.NoError(t, b.flush(t.Context(), false)) // the statement is prepared
	for key := range 200 {
		b.refuse(noon, fmt.Sprint(key), 1)
	}
	isDeaf.Store(true)
	require.Error(t, b.flush(t.Context(), false))
	isDeaf.Store(false)
	require.EqualValues(t, 200, b.Dropped())
	require.Eventually(t, func() bool { return b.sum(t) == 203 }, patient, time.Millisecond, "the server had got it")
	b.refuse(noon, "mallory", 4)
	for range 2 {
		require.NoError(t, b.flush(t.Context(), true))
	}
	require.EqualValues(t, 207, b.sum(t))
	for _, r := range b.rows(t) {
		require.Positive(t, r.Refused, r)
	}
	require.EqualValues(t, 200, b.Dropped())
}
