package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// errDenied is the one answer to a wrong password and to a login that does not exist.
var errDenied = errors.New("the login or the password is wrong")

// authenticator signs people in.
type authenticator struct {
	limiter *ratelimit.Limiter
	pool    *pgxpool.Pool
	hasher  *hasher
	// refused is told of every refusal. Nil tells nobody.
	refused func(ratelimit.Decision)
}

// signIn returns the token of a new session. An error is a *ratelimit.LimitedError when the password was
// not looked at, errDenied when it is not the account's, and otherwise a failure that admits nobody.
//
// The order is the point. A limit that is only asked before the password is checked, and charged when it
// was wrong, lets every guess pass that arrives meanwhile. Here each is charged first, in a transaction of its
// own that is committed by the time its password is looked at.
func (a *authenticator) signIn(ctx context.Context, account, password, client string) (token string, err error) {
	// 1. Limit. A crash from here on costs the attempt, and never gives one away.
	decision, err := a.limiter.Take(ctx, perAccount.For(account), perClient.For(client), overall.Global())
	if err != nil {
		return "", fmt.Errorf("limit: %w", err)
	}
	if !decision.Allowed {
		if a.refused != nil {
			a.refused(decision)
		}
		return "", decision.Err()
	}

	// 2. Verify, in no transaction: a hash takes long, and an open transaction would hold its locks as long.
	user, err := a.verify(ctx, account, password)
	if err != nil {
		return "", err
	}

	// 3. Admit. The limits forget the attempt if, and only if, the session exists.
	token = newToken()
	err = a.limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := addSession(ctx, tx, token, user.id); err != nil {
			return err
		}
		// The account's is full again. The other two get back the one token this attempt took, so that they
		// count failures; a reset of theirs would let whoever owns one account clear the limit of their
		// address, or of everybody, by signing in.
		if err := a.limiter.WithTx(tx).Reset(ctx, perAccount.For(account)); err != nil {
			return err
		}
		return a.limiter.WithTx(tx).Credit(ctx, perClient.For(client), overall.Global())
	})
	if err != nil {
		// When the outcome of the commit is unknown, the session may exist, but nobody has its token.
		return "", fmt.Errorf("admit: %w", err)
	}
	return token, nil
}

// verify returns the user of account when password is theirs, and errDenied otherwise. An account that does
// not exist takes the same path and the same time: one lookup and one hash.
func (a *authenticator) verify(ctx context.Context, account, password string) (user, error) {
	u, found, err := findUser(ctx, a.pool, account)
	if err != nil {
		return user{}, err
	}
	stored := a.hasher.decoy
	if found {
		stored = u.passwordHash
	}
	matches, err := a.hasher.verify(ctx, password, stored)
	switch {
	case err != nil:
		return user{}, err
	case !matches || !found:
		return user{}, errDenied
	}
	return u, nil
}
