package driver_test

import (
	"context"
	"database/sql"
)

// preparing is a pool that prepares each statement, as GORM has with PrepareStmt.
type preparing struct{ db *sql.DB }

// GetDBConn returns the pool.
func (p preparing) GetDBConn() (*sql.DB, error) { return p.db, nil }

// ExecContext executes where there is a connection.
func (p preparing) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	return p.db.ExecContext(ctx, query, args...)
}

// QueryContext queries where there is a connection.
func (p preparing) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	return p.db.QueryContext(ctx, query, args...)
}
