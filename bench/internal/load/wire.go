package load

import (
	"context"
	"net"
	"sync/atomic"
)

// Wire is roundtrips.Counter once more, as -against builds this module with a core of before that package. It counts the round trips on the connections that its Dial made: how often something was read after
// something was written. Statements that are sent together are one, however many they are.
type Wire struct{ trips atomic.Int64 }

// Trips returns the number of round trips so far.
func (w *Wire) Trips() int64 { return w.trips.Load() }

// Dial is net.Dialer's, with the count. It fits pgx and go-redis.
func (w *Wire) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &countedConn{Conn: conn, wire: w}, nil
}

type countedConn struct {
	net.Conn
	wire  *Wire
	asked atomic.Bool
}

func (c *countedConn) Write(b []byte) (int, error) {
	c.asked.Store(true)
	return c.Conn.Write(b)
}

func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && c.asked.Swap(false) {
		c.wire.trips.Add(1)
	}
	return n, err
}
