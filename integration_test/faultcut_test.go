package integration_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"sync"
	"syscall"

	"github.com/jackc/pgx/v5/pgxpool"
)

// cut says at which side of the server a connection breaks.
type cut int

const (
	cutRequest cut = iota // the request never arrives
	cutAnswer             // the request is carried out, and its answer is lost
)

// cutter makes a pool's connections break at a request that holds some bytes: a statement's first words,
// or, for one that is prepared, one of its parameters.
type cutter struct {
	mu       sync.Mutex
	request  []byte
	side     cut
	cuts     int // still to be made
	requests int // seen since the cutter was armed

	at      int    // the number of the only request to be cut, whatever it holds; 0: all that hold the bytes
	instead func() // what is done at that request, in place of a cut; nil: it is cut
}

// on is for a pool's configuration.
func (c *cutter) on(config *pgxpool.Config) {
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &cutConn{Conn: conn, cutter: c}, nil
	}
}

// arm makes the next so many of the requests break their connections.
func (c *cutter) arm(request string, side cut, cuts int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.request, c.side, c.cuts, c.requests = []byte(request), side, cuts, 0
	c.at, c.instead = 0, nil
}

// armAt makes the n-th request from now on break its connection, or calls instead before that is sent.
func (c *cutter) armAt(n int, side cut, instead func()) {
	c.arm("", side, 1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at, c.instead = n, instead
}

// seen returns how many of the requests have been sent since the cutter was armed.
func (c *cutter) seen() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.requests
}

func (c *cutter) decide(message []byte) (side cut, now bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	isStatement := len(message) > 0 && bytes.IndexByte([]byte("QPB"), message[0]) >= 0 // not a connection's start
	if !isStatement || c.at == 0 && (len(c.request) == 0 || !bytes.Contains(message, c.request)) {
		return 0, false
	}
	c.requests++
	if c.cuts == 0 || c.at > 0 && c.requests != c.at {
		return 0, false
	}
	c.cuts--
	if c.instead != nil {
		c.instead()
		return 0, false
	}
	return c.side, true
}

// cutConn is a connection that a cutter may break.
type cutConn struct {
	net.Conn
	cutter *cutter

	mu   sync.Mutex
	lose bool // the next answer
}

// Write reports success for a message that the network is about to lose, as a socket does.
func (c *cutConn) Write(message []byte) (int, error) {
	side, now := c.cutter.decide(message)
	switch {
	case !now:
		return c.Conn.Write(message)
	case side == cutRequest:
		return len(message), c.Close()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lose = true
	return c.Conn.Write(message)
}

// Read waits for the whole of an answer that is to be lost, so that the server has certainly done what
// was asked.
//
// It asks whether the answer is to be lost when it has it: the driver may begin to read before it has written, when
// the writing takes it long.
func (c *cutConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil || !c.loses() {
		return n, err
	}
	readyForQuery := []byte{'Z', 0, 0, 0, 5} // and one byte of status, which ends every answer
	answer := bytes.Clone(p[:n])
	for !bytes.HasSuffix(answer[:max(len(answer)-1, 0)], readyForQuery) {
		n, err := c.Conn.Read(p)
		if err != nil {
			return 0, err
		}
		answer = append(answer, p[:n]...)
	}
	return 0, errors.Join(syscall.ECONNRESET, c.Close())
}

func (c *cutConn) loses() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lose
}
