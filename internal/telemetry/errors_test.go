package telemetry_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const secret = "hunter2"

// connectError returns the error of pgx for a connection string with a closed port.
func connectError(t *testing.T, format string) error {
	t.Helper()
	const reserved = 1 // which no test of the machine can be given meanwhile, as it can a port that was just free
	_, err := pgx.Connect(t.Context(), fmt.Sprintf(format, reserved))
	require.Error(t, err)
	return err
}

// encodeError returns what pgx says of a parameter that it cannot send.
func encodeError(t *testing.T, value any) error {
	t.Helper()
	_, err := pgtype.NewMap().Encode(pgtype.Int8ArrayOID, pgtype.BinaryFormatCode, value, nil)
	require.Error(t, err)
	return err
}

func TestErrorTextHoldsNoSecret(t *testing.T) {
	t.Parallel()
	_, parse := pgx.ParseConfig("postgres://app:" + secret + "@db:notaport/app")
	require.Error(t, parse)
	for name, err := range map[string]error{
		"connect":    connectError(t, "postgres://"+secret+":"+secret+"@127.0.0.1:%d/"+secret+"?sslmode=disable"),
		"connectTLS": connectError(t, "postgres://"+secret+":"+secret+"@127.0.0.1:%d/"+secret),
		"parse":      fmt.Errorf("begin: %w", parse),
		"url":        errors.New("dial postgresql://app:" + secret + "@db/app: refused"),
		"urlSlash":   errors.New("dial postgresql://app:a/@" + secret + "@db/app: refused"),
		"keyword":    errors.New("cannot use host=db password=" + secret + " user=app"),
		"quoted":     errors.New("cannot use password = 'a b " + secret + `\' c'`),
		"query":      errors.New("bad option ?password=" + secret + "&sslmode=require"),
		"json":       errors.New(`vault said {"Passwd": "` + secret + `"}`),
		"key":        fmt.Errorf("take: %w", encodeError(t, []string{"user " + secret})),
		"rows": &pgconn.PgError{
			Severity: "ERROR", Code: "23514", Message: "violates a check",
			Detail: "Failing row contains (" + secret + ")", Where: secret, InternalQuery: secret,
		},
	} {
		text := telemetry.ErrorText(err)
		require.NotContains(t, text, secret, name)
		require.NotEmpty(t, text, name)
	}
}

// What an operator needs to find the fault stays.
func TestErrorTextNamesTheFault(t *testing.T) {
	t.Parallel()
	text := telemetry.ErrorText(connectError(t, "postgres://app:"+secret+"@127.0.0.1:%d/app?sslmode=disable"))
	require.Contains(t, text, "failed to connect: 127.0.0.1")
	require.Contains(t, text, "connection refused")

	answer := &pgconn.PgError{Severity: "FATAL", Code: "28P01", Message: `password authentication failed for user "app"`}
	require.Equal(t, `FATAL: password authentication failed for user "app" (SQLSTATE 28P01)`, telemetry.ErrorText(answer))
	require.Equal(t, `ratelimit: take "uploads": EOF`, telemetry.ErrorText(fmt.Errorf("ratelimit: take %q: %w", "uploads", io.EOF)))
	require.Equal(t, "take: unable to encode a parameter", telemetry.ErrorText(fmt.Errorf("take: %w", encodeError(t, []string{"a"}))))
}

func TestErrorType(t *testing.T) {
	t.Parallel()
	lost := fmt.Errorf("%w: %w", ratelimit.ErrContended, &pgconn.PgError{Code: "40001"})
	for want, err := range map[string]error{
		"contended":      lost,
		"overloaded":     fmt.Errorf("take: %w", ratelimit.ErrOverloaded),
		"closed":         fmt.Errorf("take: %w", ratelimit.ErrClosed),
		"commit_unknown": fmt.Errorf("%w: %w", ratelimit.ErrCommitUnknown, io.EOF),
		"pooler_mode":    fmt.Errorf("%w: %w", ratelimit.ErrPoolerMode, &pgconn.PgError{Code: "42P05"}),
		"not_migrated":   fmt.Errorf("%w: %w", ratelimit.ErrNotMigrated, &pgconn.PgError{Code: "42P01"}),
		"53300":          fmt.Errorf("take: %w", &pgconn.PgError{Code: "53300"}),
		"cancelled":      fmt.Errorf("take: %w", context.Canceled),
		"timeout":        fmt.Errorf("take: %w", context.DeadlineExceeded),
		"connection":     connectError(t, "postgres://app@127.0.0.1:%d/app"),
		"other":          errors.New("a key of somebody"),
	} {
		require.Equal(t, want, telemetry.ErrorType(err))
	}
	for _, err := range []error{io.EOF, io.ErrUnexpectedEOF, pgconn.ErrConnClosed, &net.OpError{Op: "read", Err: errors.New("reset")}} {
		require.Equal(t, "connection", telemetry.ErrorType(fmt.Errorf("take: %w", err)))
	}
}
