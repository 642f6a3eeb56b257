package integration_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/observe/sloglimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

const (
	secretPassword = "Pa55-of-the-dsn"
	secretHashKey  = "hash-key-0f-the-program"
	secretEmail    = "alice.liddell@example.org"
)

// exposed is everything that a program with a Limiter shows to others. Metrics and traces are made of the events.
type exposed struct {
	testkit.Journal
	tracing // none
}

// failed writes an error in each way in which a caller would.
func (e *exposed) failed(err error) {
	for ; err != nil; err = errors.Unwrap(err) {
		_, _ = fmt.Fprintf(e, "error: %v %+v %q\n", err, err, err.Error())
	}
}

// TraceQueryEnd and the others are of a tracer of pgx that writes errors.
func (e *exposed) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	e.failed(data.Err)
}

func (e *exposed) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	e.failed(data.Err)
}

func (e *exposed) TraceConnectStart(ctx context.Context, _ pgx.TraceConnectStartData) context.Context {
	return ctx
}

func (e *exposed) TraceConnectEnd(_ context.Context, data pgx.TraceConnectEndData) {
	e.failed(data.Err)
}

// No log, metric, trace, answer or error of a program ever holds the password of its connection string, the secret of
// Config.HashKey, or a key. With Config.HashKey no table holds one, either.
func TestNoOutputContainsASecret(t *testing.T) {
	t.Parallel()
	for name, secret := range map[string][]byte{"Plain": nil, "Hashed": []byte(secretHashKey)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			shown := &exposed{}
			logger := slog.New(slog.NewJSONHandler(shown, &slog.HandlerOptions{Level: slog.LevelDebug}))
			observer := ratelimit.Observers(sloglimit.New(sloglimit.Config{Logger: logger}), observing(func(e event.Event) {
				_, _ = fmt.Fprintf(shown, "event: %T %+v\n", e, e)
			}))
			wire := &cutter{}
			s := newStand(t, wire.on, func(c *pgxpool.Config) { c.ConnConfig.Tracer = shown })
			config := ratelimit.Config{HashKey: secret, Observer: observer, RefusalCache: 10}
			limiter := s.with(t, config)
			s.showCalls(t, shown, limiter)
			s.showFailures(t, shown, config, wire)
			if secret != nil {
				_, _ = shown.Write([]byte(s.outside.dump(t)))
			}
			text := shown.String()
			for _, expected := range []string{
				"ratelimit: refused", "ratelimit: failed", "ratelimit.Decided", "event.Failed", "SQLSTATE 28P01", "SQLSTATE 55P03", "SQLSTATE 42501",
				"connection refused", "another HashKey",
			} {
				require.Contains(t, text, expected, "it is looked for where it could be")
			}
			connection := s.pool.Config().ConnConfig
			for _, hidden := range []string{secretPassword, secretHashKey, secretEmail, "liddell", connection.Password} {
				if hidden == "" {
					continue // a server that asks for none
				}
				for _, form := range []string{
					hidden, url.QueryEscape(hidden), base64.StdEncoding.EncodeToString([]byte(hidden)), base64.RawURLEncoding.EncodeToString([]byte(hidden)),
					fmt.Sprintf("%x", hidden), fmt.Sprintf("%d", []byte(hidden)),
				} {
					at := strings.Index(strings.ToLower(text), strings.ToLower(form))
					require.Negative(t, at, "%q is shown: %s", form, text[max(at-300, 0):min(max(at, 0)+300, len(text))])
				}
			}
		})
	}
}

// showCalls makes every call, allowed and refused, and calls that cannot be.
func (s *stand) showCalls(t *testing.T, shown *exposed, limiter *ratelimit.Limiter) {
	t.Helper()
	ctx, slot := t.Context(), daylong("slots", 1).For(secretEmail)
	r, err := limiter.Reserve(ctx, roomy.For(secretEmail))
	require.NoError(t, err)
	lease := acquire(t, limiter, slot)
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	for name, call := range everyCall {
		for _, request := range []ratelimit.Request{
			tight.For(secretEmail).Cost(2), roomy.For(secretEmail + "\x00"), daylong("slots", 1).For(strings.Repeat(secretEmail, 20)),
		} {
			shown.failed(call(ctx, limiter, r.ID, request))
			shown.failed(call(ctx, limiter, unknownID, request))
			shown.failed(call(cancelled, limiter, r.ID, request))
			shown.failed(limiter.InTx(ctx, func(tx pgx.Tx) error { return call(ctx, limiter.WithTx(tx), r.ID, request) }))
			shown.failed(limiter.Require(ctx, request, tight.For(secretEmail)))
			_, _ = fmt.Fprintf(shown, "%s of %v\n", name, request)
		}
	}
	shown.failed(errOf(limiter.Acquire(ctx, slot)))
	shown.failed(errors.Join(limiter.Release(ctx, lease.ID), limiter.Release(ctx, lease.ID)))
	shown.failed(errors.Join(errOf(limiter.RenewLease(ctx, lease.ID)), errOf(limiter.RenewLease(ctx, lease.ID+"0"))))
}

// showFailures makes calls where the database fails in one way after the other.
func (s *stand) showFailures(t *testing.T, shown *exposed, config ratelimit.Config, wire *cutter) {
	t.Helper()
	some := map[string]bool{"Take": true, "TakeSeveral": true, "Reserve": true, "Settle": true, "Value": true}
	ask := func(pool ratelimit.Pool, config ratelimit.Config) {
		limiter, err := ratelimit.New(pool, config)
		require.NoError(t, err)
		for name, call := range everyCall {
			if !some[name] && config.Schema == "" {
				continue
			}
			ctx, cancel := context.WithTimeout(t.Context(), patient)
			shown.failed(call(ctx, limiter, unknownID, roomy.For(secretEmail)))
			cancel()
		}
		shown.failed(limiter.Close(t.Context()))
		shown.failed(limiter.Require(t.Context(), roomy.For(secretEmail)))
	}
	other, unmade := config, config
	other.HashKey, unmade.Schema = []byte("another-"+secretHashKey), "unmade"
	ask(s.pool, other)
	ask(s.pool, unmade)
	for _, change := range []func(*pgxpool.Config){
		func(c *pgxpool.Config) { c.ConnConfig.User, c.ConnConfig.Password = "ana", secretPassword }, // the superuser may need none
		func(c *pgxpool.Config) { c.ConnConfig.Password, c.ConnConfig.Port = secretPassword, 1 },
		func(c *pgxpool.Config) { c.ConnConfig.Password, c.ConnConfig.Database = secretPassword, "nowhere" },
		func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["role"] = "pg_monitor" },
	} {
		broken := s.pool.Config()
		change(broken)
		pool, err := pgxpool.NewWithConfig(t.Context(), broken)
		require.NoError(t, err)
		ask(pool, config)
		pool.Close()
	}
	takeOne(t, s.with(t, ratelimit.Config{HashKey: config.HashKey}), roomy.For(secretEmail))
	heal := s.setDefault(t, "lock_timeout", "20ms")
	tx := s.outside.begin(t, pgx.ReadCommitted)
	_, err := tx.Exec(t.Context(), `SELECT FROM ratelimit.buckets FOR UPDATE`)
	require.NoError(t, err)
	ask(s.pool, config)
	require.NoError(t, tx.Rollback(t.Context()))
	heal()
	for _, side := range []cut{cutHalfRequest, cutHalfAnswer} {
		wire.arm("roomy", side, 5)
		ask(s.pool, config)
		wire.arm("commit", side, 5)
		ask(s.pool, config)
		wire.arm("", side, 0)
	}
	s.pool.Reset()
}

// dump returns all rows of the Limiter's tables.
func (b *bundle) dump(t *testing.T) (rows string) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), `
		SELECT string_agg(query_to_xml(format('SELECT * FROM ratelimit.%I', relname), true, true, '')::text, ' ')
		FROM pg_class WHERE relnamespace = 'ratelimit'::regnamespace AND relkind = 'r'`).Scan(&rows))
	require.Contains(t, rows, "roomy")
	return rows
}
