package migrations

import (
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pressly/goose/v3"
)

// What the tests of this package see beside its exported names.
var (
	NewProvider = func(pool *pgxpool.Pool, schema string) (*goose.Provider, error) { return newProvider(pool, schema, 0) }
	Rewrite     = rewrite
)
