package telemetry

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// ErrorType returns what kind of error err is, as one of few words or the server's SQLSTATE, so that it can
// label a metric.
func ErrorType(err error) string {
	var answer *pgconn.PgError
	switch {
	case errors.Is(err, ratelimit.ErrContended):
		return Contended
	case errors.Is(err, ratelimit.ErrOverloaded):
		return "overloaded"
	case errors.Is(err, ratelimit.ErrClosed):
		return "closed"
	case errors.Is(err, ratelimit.ErrCommitUnknown):
		return "commit_unknown"
	case errors.Is(err, ratelimit.ErrNotMigrated):
		return "not_migrated"
	case errors.Is(err, ratelimit.ErrPoolerMode):
		return "pooler_mode"
	case errors.Is(err, context.Canceled): // also with the 57014 of the cancel request that followed
		return Cancelled
	case errors.As(err, &answer) && len(answer.Code) == 5 && !(answer.Code == "57014" && isTimeout(err)):
		return answer.Code
	case isTimeout(err):
		return "timeout"
	case isConnection(err):
		return "connection"
	}
	return "other"
}

// Cancelled is the ErrorType and the result of a call whose caller left.
const Cancelled = "cancelled"

// stall is how long a caller waits for a decision before its leaving says more about the database than about the
// caller. A decision takes milliseconds. The alert on stalls reads the bucket of this bound.
const stall = 250 * time.Millisecond

// HasStalled reports whether the caller of a failed call left after it had waited for long.
func HasStalled(f event.Failed) bool { return f.Elapsed > stall && ErrorType(f.Err) == Cancelled }

func isTimeout(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)
}

func isConnection(err error) bool {
	var connect *pgconn.ConnectError
	var network net.Error
	return errors.As(err, &connect) || errors.As(err, &network) || errors.Is(err, pgconn.ErrConnClosed) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

var (
	// What pgx could not encode it prints, and that may be a key. Nothing says where the value ends.
	encoded = regexp.MustCompile(`(?s)\b((?:unable|failed) to|cannot) encode .*`)

	connecting = regexp.MustCompile("failed to connect to `[^`]*`")
	userInfo   = regexp.MustCompile(`://\S*@`)
	password   = regexp.MustCompile(`(?i)(passw(?:or)?d|secret)(["']?\s*[=:]\s*)('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s&;,]+)`)
)

// ErrorText returns the text of err, without passwords, connection strings, and values that were sent to the database.
// For an error of the server it returns the message without the details, which hold rows.
func ErrorText(err error) string {
	var parse *pgconn.ParseConfigError
	if errors.As(err, &parse) {
		return "cannot parse the connection string" // pgx masks only the passwords that it recognises
	}
	text := encoded.ReplaceAllString(err.Error(), "$1 encode a parameter")
	text = connecting.ReplaceAllString(text, "failed to connect")
	text = userInfo.ReplaceAllString(text, "://")
	return password.ReplaceAllString(text, "$1${2}xxxxx")
}
