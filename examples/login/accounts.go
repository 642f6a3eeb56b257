package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const sessionLifetime = 12 * time.Hour

// user is a row of login.users.
type user struct {
	id           int64
	passwordHash string
}

// findUser returns the user of account, and whether there is one.
func findUser(ctx context.Context, pool *pgxpool.Pool, account string) (u user, found bool, err error) {
	err = pool.QueryRow(ctx, `SELECT id, password_hash FROM login.users WHERE login = $1`, account).Scan(&u.id, &u.passwordHash)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return user{}, false, nil
	case err != nil:
		return user{}, false, fmt.Errorf("find the user: %w", err)
	}
	return u, true, nil
}

// newToken returns what identifies a session: 130 random bits that only the browser keeps.
func newToken() string { return rand.Text() }

// addSession writes the session of token in the caller's transaction.
func addSession(ctx context.Context, tx pgx.Tx, token string, userID int64) error {
	sum := sha256.Sum256([]byte(token))
	_, err := tx.Exec(ctx, `INSERT INTO login.sessions (token_hash, user_id, expires_at) VALUES ($1, $2, now() + $3::interval)`,
		sum[:], userID, sessionLifetime)
	if err != nil {
		return fmt.Errorf("add a session: %w", err)
	}
	return nil
}

// findSession returns the account that token is signed in to, or "" when it is signed in to none.
func findSession(ctx context.Context, pool *pgxpool.Pool, token string) (account string, err error) {
	sum := sha256.Sum256([]byte(token))
	err = pool.QueryRow(ctx, `SELECT u.login FROM login.sessions AS s JOIN login.users AS u ON u.id = s.user_id
		WHERE s.token_hash = $1 AND s.expires_at > now()`, sum[:]).Scan(&account)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("find the session: %w", err)
	}
	return account, nil
}

// endSession signs token out.
func endSession(ctx context.Context, pool *pgxpool.Pool, token string) error {
	sum := sha256.Sum256([]byte(token))
	if _, err := pool.Exec(ctx, `DELETE FROM login.sessions WHERE token_hash = $1`, sum[:]); err != nil {
		return fmt.Errorf("end the session: %w", err)
	}
	return nil
}
