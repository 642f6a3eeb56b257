package ratelimit_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// errSent is what a keyRecorder answers.
var errSent = errors.New("sent")

// keyRecorder is a transaction that records the key that a Take sends, in a database without a stored secret.
type keyRecorder struct {
	untouched
	key string
}

func (r *keyRecorder) Query(_ context.Context, _ string, args ...any) (pgx.Rows, error) {
	if len(args) == 2 { // for the fingerprint
		return noRows{}, nil
	}
	r.key = args[1].(string)
	return nil, errSent
}

type noRows struct{ pgx.Rows }

func (noRows) Next() bool { return false }
func (noRows) Err() error { return nil }
func (noRows) Close()     {}

func (noRows) CommandTag() (tag pgconn.CommandTag) { return tag }

// FuzzKey checks that the table can store every accepted key.
func FuzzKey(f *testing.F) {
	for _, key := range []string{"", "a", " a ", "A", "\x00", "a\x00b", "\xff", "é", strings.Repeat("x", 256), strings.Repeat("x", 257), strings.Repeat("é", 128)} {
		f.Add(key)
	}
	limit := ratelimit.Define("fuzz", ratelimit.PerSecond(1))
	f.Fuzz(func(t *testing.T, key string) {
		sent := func(config ratelimit.Config) (string, error) {
			tx := &keyRecorder{untouched: untouched{t: t}}
			limiter, err := ratelimit.New(tx, config)
			require.NoError(t, err)
			if _, err = limiter.WithTx(tx).Take(t.Context(), limit.For(key)); errors.Is(err, errSent) {
				err = nil
			}
			return tx.key, err
		}
		plain, err := sent(ratelimit.Config{})
		if err != nil {
			require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
			require.Empty(t, plain)
		} else {
			require.Equal(t, key, plain)
			require.True(t, len(plain) >= 1 && len(plain) <= 256 && utf8.ValidString(plain) && !strings.Contains(plain, "\x00"))
		}
		hashed, err := sent(ratelimit.Config{HashKey: []byte("0123456789abcdef")})
		if err != nil {
			require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
			require.True(t, key == "" || len(key) > 1<<16)
			return
		}
		require.Regexp(t, `^[A-Za-z0-9_-]{43}$`, hashed)
		require.NotEqual(t, key, hashed)
	})
}
