package integration_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/jackc/pgx/v5/pgxpool"
)

// cut says at which side of the server a connection breaks.
type cut int

const (
	cutRequest     cut = iota // the request never arrives
	cutAnswer                 // the request is carried out, and its answer is lost
	cutHalfRequest            // half of the request arrives
	cutHalfAnswer             // the request is carried out, and half of its answer arrives
)

// cutter makes a pool's connections break at a request that contains some bytes: a statement's first words or, for a prepared
// statement, one of its parameters.
type cutter struct {
	mu       sync.Mutex
	request  []byte
	side     cut
	cuts     int // still to be made
	requests int // seen since the cutter was armed

	at      int    // the number of the only request to cut, of any content; 0: all requests that contain the bytes
	instead func() // called at that request in place of a cut; nil: cut it

	prepared map[string]string // the statements that requests have named, by these names
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

// decide returns the side at which a message breaks the connection, if it does.
func (c *cutter) decide(message []byte) (side cut, now bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	isStatement := len(message) > 0 && bytes.IndexByte([]byte("QPB"), message[0]) >= 0 // not a connection's start
	executed := c.executed(message)
	if !isStatement || c.at == 0 && (len(c.request) == 0 || !c.isIn(message, executed)) {
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

// isIn reports whether the cutter is armed for a message that executes some statements: by its bytes, or by the first words of a statement
// that was prepared before. It is not armed for a message that only prepares BEGIN or COMMIT.
func (c *cutter) isIn(message []byte, executed []string) bool {
	if len(executed) == 0 && (bytes.HasPrefix(c.request, []byte("begin")) || bytes.HasPrefix(c.request, []byte("commit"))) {
		return false
	}
	return bytes.Contains(message, c.request) ||
		slices.ContainsFunc(executed, func(sql string) bool { return strings.HasPrefix(sql+"\x00", string(c.request)) })
}

// executed returns the statements that a request executes, and remembers the statements that it prepares.
func (c *cutter) executed(request []byte) (sql []string) {
	text := func(rest []byte) (string, []byte) {
		before, after, _ := bytes.Cut(rest, []byte{0})
		return string(before), after
	}
	for len(request) >= 5 {
		kind, size := request[0], int(binary.BigEndian.Uint32(request[1:]))
		if size < 4 || size+1 > len(request) {
			break // the beginning of a connection
		}
		first, rest := text(request[5 : size+1])
		second, _ := text(rest)
		switch kind {
		case 'Q':
			sql = append(sql, first)
		case 'P':
			if c.prepared == nil {
				c.prepared = map[string]string{}
			}
			c.prepared[first] = second
		case 'B':
			sql = append(sql, c.prepared[second])
		}
		request = request[size+1:]
	}
	return sql
}

// cutConn is a connection that a cutter may break.
type cutConn struct {
	net.Conn
	cutter *cutter

	mu   sync.Mutex
	lose cut // the next answer; cutRequest: none

	broken bool   // whether nothing more is read from the connection
	kept   []byte // of the last answer, which is still to be read
}

// Write reports success for a message that the network is about to lose, as a socket does.
func (c *cutConn) Write(message []byte) (int, error) {
	side, now := c.cutter.decide(message)
	if !now {
		return c.Conn.Write(message)
	}
	switch side {
	case cutRequest:
		return len(message), c.Close()
	case cutHalfRequest:
		_, err := c.Conn.Write(message[:len(message)/2])
		return len(message), errors.Join(err, c.Close())
	default:
		c.mu.Lock()
		defer c.mu.Unlock()
		c.lose = side
		return c.Conn.Write(message)
	}
}

// Read waits for the whole of an answer to drop, so that the server has certainly executed the request.
//
// It decides whether to drop the answer only after reading it, because the driver may begin to read before a slow write has ended.
func (c *cutConn) Read(p []byte) (int, error) {
	if c.broken {
		return c.readKept(p)
	}
	n, err := c.Conn.Read(p)
	c.mu.Lock()
	side := c.lose
	c.mu.Unlock()
	if err != nil || side == cutRequest {
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
	c.broken = true
	if side == cutHalfAnswer {
		c.kept = answer[:len(answer)/2]
	}
	if conn, ok := c.Conn.(*net.TCPConn); ok { // the server notices at its next read or write
		if err := conn.SetLinger(0); err != nil {
			return 0, err
		}
	}
	if err := c.Close(); err != nil {
		return 0, err
	}
	return c.readKept(p)
}

// readKept reads the part of the last answer that has arrived.
func (c *cutConn) readKept(p []byte) (int, error) {
	if len(c.kept) == 0 {
		return 0, syscall.ECONNRESET
	}
	n := copy(p, c.kept)
	c.kept = c.kept[n:]
	return n, nil
}
