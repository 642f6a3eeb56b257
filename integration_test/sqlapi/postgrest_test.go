package sqlapi_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"regexp"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

// postgREST sends the statements of PostgREST for a request: it begins a transaction, which can't write for GET,
// switches the role, sets what it knows of the request, and calls the pre-request function before the request itself.
// PostgREST isn't run here.
type postgREST struct {
	pool *pgxpool.Pool
	role string
}

func (p postgREST) request(ctx context.Context, method, claims, headers string) error {
	options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}
	if method == "GET" || method == "HEAD" {
		options.AccessMode = pgx.ReadOnly
	}
	return pgx.BeginTxFunc(ctx, p.pool, options, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SELECT set_config('search_path', '"public"', true), set_config('role', $1, true), set_config('request.jwt.claims', $2, true),
			set_config('request.method', $3, true), set_config('request.path', '/notes', true), set_config('request.headers', $4, true),
			set_config('request.cookies', '{}', true)`, p.role, claims, method, headers)
		if err == nil {
			_, err = tx.Exec(ctx, `SELECT "public"."limit_request"()`)
		}
		if err == nil && options.AccessMode == pgx.ReadWrite {
			_, err = tx.Exec(ctx, `INSERT INTO public.notes (author) VALUES ('x')`)
		}
		return err
	})
}

// TestPreRequest promises that the pre-request function of docs/sql.md limits each subject of a JWT, and each address
// without one, for a role that may call no function of the limiter. A refusal asks PostgREST for the status 429 with
// Retry-After, and undoes the request.
func TestPreRequest(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/sql.md")
	require.NoError(t, err)
	function := regexp.MustCompile(`(?s)CREATE FUNCTION public\.limit_request.*?\n\$\$;`).FindString(string(page))
	require.NotEmpty(t, function)
	pool := postgrestest.New(t)
	store(t, pool, map[string]string{"messages": `{"kind": "fixed window", "rate": 2, "period": "8760h"}`})
	role, _ := postgrestest.NewRole(t, pool, "")
	_, err = pool.Exec(t.Context(), function+`CREATE TABLE public.notes (author text); GRANT INSERT ON public.notes TO `+role)
	require.NoError(t, err)
	rest := postgREST{pool, role}
	for _, client := range []struct{ claims, headers string }{
		{`{"sub": "bob", "role": "web"}`, `{"x-forwarded-for": "203.0.113.7"}`},
		{`{"sub": "ann", "role": "web"}`, `{"x-forwarded-for": "203.0.113.7"}`},
		{`{"role": "web"}`, `{"x-forwarded-for": "made up, 203.0.113.7"}`},
		{``, `{"x-forwarded-for": "203.0.113.8"}`},
		{`{}`, `{}`},
	} {
		for range 2 {
			require.NoError(t, rest.request(t.Context(), "POST", client.claims, client.headers))
		}
		var refused *pgconn.PgError
		require.ErrorAs(t, rest.request(t.Context(), "PATCH", client.claims, client.headers), &refused)
		require.Equal(t, "PGRST", refused.Code, "%v", refused)
		var body struct{ Code, Message string }
		require.NoError(t, json.Unmarshal([]byte(refused.Message), &body))
		require.Equal(t, "PT429", body.Code)
		var answer struct {
			Status  int
			Headers map[string]string
		}
		require.NoError(t, json.Unmarshal([]byte(refused.Detail), &answer))
		require.Equal(t, 429, answer.Status)
		require.Regexp(t, `^[1-9][0-9]*$`, answer.Headers["Retry-After"])
		require.NoError(t, rest.request(t.Context(), "GET", client.claims, client.headers), "a transaction that can't write isn't counted")
	}
	var keys []string
	var notes int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM public.notes), (SELECT array_agg(key) FROM ratelimit.buckets)`).Scan(&notes, &keys))
	require.Equal(t, 10, notes)
	require.ElementsMatch(t, []string{"user bob", "user ann", "address 203.0.113.7", "address 203.0.113.8", "address unknown"}, keys)

	_, err = pool.Exec(t.Context(), "BEGIN; SET LOCAL ROLE "+role+"; SELECT ratelimit.take('messages', 'user bob')")
	var denied *pgconn.PgError
	require.True(t, errors.As(err, &denied) && denied.Code == "42501", "%v", err)
}
