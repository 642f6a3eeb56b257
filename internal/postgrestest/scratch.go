package postgrestest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const dropTimeout = 2 * time.Minute // it waits for a checkpoint, which a busy machine has to write out first

// Scratch is a database that a program makes for itself, so that it can be run on any server.
type Scratch struct {
	Pool         *pgxpool.Pool
	server, name string
}

// NewScratch makes a database on the server at url, under a name that begins with prefix and that no other
// has, with a pool of at most connections. Drop it in the end.
func NewScratch(ctx context.Context, url, prefix string, connections int32) (_ *Scratch, err error) {
	s := &Scratch{server: url, name: prefix + "_" + strings.ToLower(rand.Text()[:8])}
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("read the database URL: %w", err)
	}
	if err := s.execOnServer(ctx, "CREATE DATABASE "+pgx.Identifier{s.name}.Sanitize()); err != nil {
		return nil, fmt.Errorf("create the database %s: %w", s.name, err)
	}
	config.ConnConfig.Database, config.MaxConns = s.name, connections
	if s.Pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return nil, errors.Join(fmt.Errorf("connect to the database %s: %w", s.name, err), s.Drop(ctx))
	}
	return s, nil
}

// Drop closes the pool and drops the database, also when ctx has ended.
func (s *Scratch) Drop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dropTimeout)
	defer cancel()
	if s.Pool != nil {
		s.Pool.Close()
	}
	if err := s.execOnServer(ctx, "DROP DATABASE "+pgx.Identifier{s.name}.Sanitize()+" WITH (FORCE)"); err != nil {
		return fmt.Errorf("drop the database %s: %w", s.name, err)
	}
	return nil
}

// execOnServer runs sql on a connection to the database that the server's URL names.
func (s *Scratch) execOnServer(ctx context.Context, sql string) (err error) {
	conn, err := pgx.Connect(ctx, s.server)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	_, err = conn.Exec(ctx, sql)
	return err
}
