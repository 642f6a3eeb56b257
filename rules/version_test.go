package rules

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// errBegun is the error of BeginTx.
var errBegun = errors.New("begun")

// versioned is a database with a version of the rules, and no rules.
type versioned int64

func (v versioned) QueryRow(context.Context, string, ...any) pgx.Row { return v }

func (v versioned) Scan(dest ...any) error {
	*dest[0].(*int64) = int64(v) //nolint:forcetypeassert // a test would panic
	return nil
}

func (versioned) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) { return nil, errBegun }

// A Set loads the tables again if they have another version than the rules that it has, and only then.
func TestRefreshLoadsAnotherVersion(t *testing.T) {
	t.Parallel()
	set, err := NewSet(&pgxpool.Pool{}, Config{})
	require.NoError(t, err)
	require.ErrorIs(t, set.refresh(t.Context(), versioned(0)), errBegun, "nothing is loaded")
	set.current.Store(&snapshot{version: 7, wake: maxInstant})
	require.ErrorIs(t, set.refresh(t.Context(), versioned(8)), errBegun)
	require.ErrorIs(t, set.refresh(t.Context(), versioned(6)), errBegun, "the tables were restored from a backup")
	require.NoError(t, set.refresh(t.Context(), versioned(7)))
	set.current.Store(&snapshot{version: 7, wake: time.Now().UnixMicro()})
	require.ErrorIs(t, set.refresh(t.Context(), versioned(7)), errBegun, "a pause begins")
}
