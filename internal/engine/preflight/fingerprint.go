package preflight

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/store"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// NoSecret is the fingerprint of a program that stores keys as they are.
const NoSecret = "none"

// FingerprintOf returns a hash of a secret for the tables, which does not reveal the secret.
func FingerprintOf(secret []byte) string {
	if len(secret) == 0 {
		return NoSecret
	}
	mac := hmac.New(sha256.New, secret)
	// without the NUL that is in every text that a Limiter hashes
	mac.Write([]byte("pgratelimit: the fingerprint of HashKey"))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

//go:embed sql/*.sql
var files embed.FS

// way is the connection path of a statement.
type way struct {
	config *pgx.ConnConfig // of the connection; nil when it is none of pgx's, or unknown
	direct bool            // whether the connection was made to the process of the server that ran the statement
}

// runAtOnce makes pgx send a statement with its parameters in one message, in any mode of the connection: it works
// behind any pooler.
const runAtOnce = pgx.QueryExecModeExec

// hidden returns the expression for the tables of which row level security may hide rows. It finds the schema by the
// table of buckets.
func hidden() string {
	return pgerr.Hidden(`(SELECT s.nspname FROM pg_catalog.pg_class AS b JOIN pg_catalog.pg_namespace AS s ON s.oid = b.relnamespace
	WHERE b.oid = pg_catalog.to_regclass($1::text))`, "current_user", "buckets", "leases", "reservations", "fingerprint")
}

// look returns the fingerprint that is stored, or "", and the connection path by which it read that. The store learns
// how the tables are laid out. An engine that is not Postgres stores own, unless that is "", if it has no fingerprint.
func look(ctx context.Context, u *store.Unit, own string) (stored string, by way, err error) {
	if memory, ok := u.Engine().(interface{ Fingerprint(own string) string }); ok {
		return memory.Fingerprint(own), by, nil
	}
	rows, err := u.Conn().Query(ctx, strings.ReplaceAll(u.Statement(files, "fingerprint_read"), "$hidden", hidden()),
		runAtOnce, u.Table())
	if err != nil {
		return "", by, err
	}
	var backend uint32
	var hasCitus, partitioned bool
	var tables string
	digits := 1
	_, err = pgx.ForEachRow(rows, []any{&stored, &backend, &hasCitus, &partitioned, &tables, &digits}, func() error {
		if conn := rows.Conn(); conn != nil {
			by = way{conn.Config(), conn.PgConn().PID() == backend}
		}
		return nil
	})
	if err == nil && partitioned {
		err = pgerr.PartitionedError(u.Schema())
	}
	if err == nil {
		err = pgerr.HiddenError(u.Schema(), tables)
	}
	if err == nil {
		err = checkDigits(digits, by.config)
	}
	if err != nil || u.KnowsLayout() {
		return stored, by, err
	}
	if hasCitus {
		rows, err := u.Conn().Query(ctx, u.Statement(files, "layout"), runAtOnce, u.Table())
		if err == nil {
			hasCitus, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
		}
		if err != nil {
			return "", by, err
		}
	}
	u.SetLayout(hasCitus)
	return stored, by, nil
}

// ErrDigits is returned on connections that would round the tokens of each row that they read and write back.
var ErrDigits = errors.New("ratelimit: tokens would be rounded")

// checkDigits returns ErrDigits if the server rounds numbers in texts, and the connection, of a config, reads numbers
// as texts. A driver other than pgx always does.
func checkDigits(digits int, config *pgx.ConnConfig) error {
	if digits >= 1 {
		return nil
	}
	how := "database/sql"
	if config != nil {
		switch config.DefaultQueryExecMode {
		case pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol:
			how = Mode(config.DefaultQueryExecMode)
		default:
			return nil
		}
	}
	return fmt.Errorf("%w: extra_float_digits is %d on the connection, which reads numbers as texts (%s); run ALTER "+
		"ROLE name SET extra_float_digits = 1, "+
		"and connect again, or with pgx set default_query_exec_mode=cache_describe", ErrDigits, digits, how)
}

// lookAndStore returns the fingerprint that is stored, and stores own if there is none. It first reads, so that most
// programs write nothing, and it stores nothing if judge returns an error for the connection path. It always stores at
// READ COMMITTED: no transaction that looked at SERIALIZABLE loses against it. s is a session on the pool.
func lookAndStore(ctx context.Context, s *store.Session, verb, own string,
	judge func(way) error,
) (stored string, err error) {
	var by way
	err = s.Change(ctx, verb, func(ctx context.Context, s *store.Session) (err error) {
		stored, by, err = look(ctx, &s.Unit, own)
		return err
	})
	if err == nil {
		err = judge(by)
	}
	if err != nil || stored != "" {
		return stored, err
	}
	err = s.RetryTx(ctx, verb, func(tx *store.Session) error {
		_, err := tx.Conn().Exec(ctx, tx.Statement(files, "fingerprint_insert"), own)
		if err == nil {
			stored, _, err = look(ctx, &tx.Unit, "")
		}
		return err
	})
	return stored, err
}
