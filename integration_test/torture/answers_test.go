//go:build unix

package torture_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"
)

// statements says for which statements answers are lost.
type statements int32

const (
	noStatements statements = iota
	onlyCommits
	allStatements
)

func (s statements) String() string { return [...]string{"nothing", "COMMIT", "any statement"}[s] }

// answers loses answers on their way from the server to the process. The server has run the statement then, its connection breaks,
// and the process cannot know the outcome.
type answers struct {
	losing atomic.Int32 // of which statements
	lost   atomic.Int64
}

var errLost = errors.New("the connection broke before the answer came")

// of has the answers on a pool's connections come through a.
func (a *answers) of(config *pgxpool.Config) {
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &answeredConn{Conn: conn, answers: a}, nil
	}
}

// lose loses answers to such statements until so many were lost, or ctx ends.
func (a *answers) lose(ctx context.Context, to statements, many int64) error {
	before := a.lost.Load()
	a.losing.Store(int32(to))
	defer a.losing.Store(int32(noStatements))
	return until(ctx, func() bool { return a.lost.Load()-before >= many })
}

type answeredConn struct {
	net.Conn
	*answers

	commits atomic.Bool // whether the last statement sent is a COMMIT
}

func (c *answeredConn) Write(b []byte) (int, error) {
	c.commits.Store(bytes.Contains(b, []byte("commit\x00")) || bytes.Contains(b, []byte("COMMIT\x00")))
	return c.Conn.Write(b)
}

func (c *answeredConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	losing := statements(c.losing.Load())
	if n == 0 || losing == noStatements || losing == onlyCommits && !c.commits.Load() {
		return n, err
	}
	c.lost.Add(1)
	return 0, errors.Join(errLost, c.Close())
}

// loseAnswers returns the fault that answers to such statements are lost.
func (f *faults) loseAnswers(to statements) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		many := 4 + f.random.Int64N(12)
		return fmt.Sprintf("%d answers to %v", many, to), f.client.answers.lose(ctx, to, many)
	}
}
