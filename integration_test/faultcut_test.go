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
	cutUnanswered             // the request arrives, but the connection breaks before its answer
	cutHalfAnswer             // the request is carried out, and half of its answer arrives
	cutAnswered               // the answer arrives, and the connection breaks behind it
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
	broken   [][]string        // the statements of each request that was cut
	from     string            // the address on this side of the last connection that broke
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

// brokenFrom returns the address on this side of the last connection that broke.
func (c *cutter) brokenFrom() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.from
}

func (c *cutter) decide(conn net.Conn, message []byte) (side cut, now bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	isStatement := len(message) > 0 && bytes.IndexByte([]byte("QPB"), message[0]) >= 0 // not a connection's start
	sql, carriedOut := c.statements(message)
	if !isStatement || c.at == 0 && (len(c.request) == 0 || !c.isIn(message, carriedOut)) {
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
	c.broken = append(c.broken, sql)
	c.from = conn.LocalAddr().String()
	return c.side, true
}

// isIn reports whether the cutter is armed for a message that carries out some statements: by its bytes, or by the first words of a statement
// that was prepared before. A message that only prepares BEGIN or COMMIT is no such message.
func (c *cutter) isIn(message []byte, carriedOut []string) bool {
	if len(carriedOut) == 0 && (bytes.HasPrefix(c.request, []byte("begin")) || bytes.HasPrefix(c.request, []byte("commit"))) {
		return false
	}
	return bytes.Contains(message, c.request) ||
		slices.ContainsFunc(carriedOut, func(sql string) bool { return strings.HasPrefix(sql+"\x00", string(c.request)) })
}

// statements returns the statements that a request prepares or executes, and the statements that it executes.
func (c *cutter) statements(request []byte) (sql, carriedOut []string) {
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
		switch kind {
		case 'Q':
			sql, carriedOut = append(sql, first), append(carriedOut, first)
		case 'P':
			statement, _ := text(rest)
			if c.prepared == nil {
				c.prepared = map[string]string{}
			}
			c.prepared[first] = statement
			sql = append(sql, statement)
		case 'B':
			name, _ := text(rest)
			sql, carriedOut = append(sql, c.prepared[name]), append(carriedOut, c.prepared[name])
		}
		request = request[size+1:]
	}
	return sql, carriedOut
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
	side, now := c.cutter.decide(c.Conn, message)
	if !now {
		return c.Conn.Write(message)
	}
	switch side {
	case cutRequest:
		return len(message), c.Close()
	case cutHalfRequest:
		_, err := c.Conn.Write(message[:len(message)/2])
		return len(message), errors.Join(err, c.Close())
	case cutUnanswered:
		_, err := c.Conn.Write(message)
		return len(message), errors.Join(err, c.reset())
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
	side := c.loses()
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
	if side == cutAnswered {
		c.kept = answer
	}
	if err := c.reset(); err != nil {
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

// reset breaks the connection without a message to the server, which notices at its next read or write.
func (c *cutConn) reset() error {
	if conn, ok := c.Conn.(*net.TCPConn); ok {
		if err := conn.SetLinger(0); err != nil {
			return err
		}
	}
	return c.Close()
}

func (c *cutConn) loses() cut {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lose
}
