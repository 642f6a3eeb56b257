package pgerr

import (
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

func TestExplain(t *testing.T) {
	t.Parallel()
	server := func(code string) error { return fmt.Errorf("take: %w", &pgconn.PgError{Code: code}) }
	for _, code := range []string{UndefinedTable, UndefinedColumn, InvalidSchemaName} {
		err := Explain(server(code), "limits", "")
		require.ErrorIs(t, err, ErrNotMigrated)
		require.ErrorContains(t, err, `(schema "limits")`)
		require.Equal(t, code, Code(err))
		require.True(t, IsMissing(err))
	}
	err := Explain(server(InsufficientPrivilege), "limits", "SELECT on rules")
	require.NotErrorIs(t, err, ErrNotMigrated)
	require.ErrorContains(t, err, `; on schema "limits" the role needs SELECT on rules: migrations.Grants has the statements`)
	require.ErrorContains(t, Explain(server(InFailedTransaction), "limits", ""), "; an earlier statement of the transaction failed")
	for _, other := range []error{nil, errors.ErrUnsupported, server(QueryCanceled)} {
		require.Equal(t, other, Explain(other, "limits", "SELECT"))
		require.False(t, IsMissing(other))
	}
	require.Empty(t, Code(errors.ErrUnsupported))
}
