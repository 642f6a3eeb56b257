package main

import (
	"context"
	"crypto/rand"
	_ "embed"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const poolSize = 16

//go:embed schema.sql
var schema string

// people returns who has an account in the demo.
func people() []string { return []string{"ada", "alan", "grace"} }

func passwordOf(name string) string { return name + " has a long password" }

// migrate makes the limiter's table, and the application's in a schema of its own. That, and pgxpool.New, is all
// a service does of this.
func migrate(ctx context.Context, pool *pgxpool.Pool) error {
	if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, schema); err != nil {
		return fmt.Errorf("create the application's tables: %w", err)
	}
	return nil
}

// newAuthenticator returns one whose users and limits are in pool's database. A nil asOf is the
// database's clock.
func newAuthenticator(pool *pgxpool.Pool, asOf func() time.Time, hasher *hasher) (*authenticator, error) {
	// The table holds no login and no address, only their HMAC. A service reads this secret from
	// where it keeps its others: with a new one, every limit starts full.
	secret := make([]byte, 32)
	_, _ = rand.Read(secret) // never fails
	limiter, err := ratelimit.New(pool, ratelimit.Config{HashKey: secret, AsOf: asOf})
	if err != nil {
		return nil, err
	}
	return &authenticator{limiter: limiter, pool: pool, hasher: hasher}, nil
}

// register gives each of names an account.
func (a *authenticator) register(ctx context.Context, names ...string) error {
	for _, name := range names {
		_, err := a.pool.Exec(ctx, `INSERT INTO login.users (login, password_hash) VALUES ($1, $2)`,
			name, a.hasher.hash(passwordOf(name)))
		if err != nil {
			return fmt.Errorf("register %q: %w", name, err)
		}
	}
	return nil
}
