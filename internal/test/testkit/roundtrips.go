package testkit

import (
	"context"
	"net"
	"sync/atomic"
)

// RoundTrips counts the round trips on the connections that its Dial made: how often something was read after something
// was written. Statements that are sent together are one, however many they are. The zero
// RoundTrips is ready for use.
type RoundTrips struct{ trips atomic.Int64 }

// Trips returns the number of round trips so far.
func (c *RoundTrips) Trips() int64 { return c.trips.Load() }

// Of returns the round trips that call makes.
func (c *RoundTrips) Of(call func()) int {
	before := c.trips.Load()
	call()
	return int(c.trips.Load() - before)
}

// Dial is net.Dialer's, with the count. It fits pgx, lib/pq and go-redis.
func (c *RoundTrips) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	made, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &conn{Conn: made, counter: c}, nil
}

// conn is a connection that is counted.
type conn struct {
	net.Conn
	counter *RoundTrips
	asked   atomic.Bool
}

// Write sends.
func (c *conn) Write(b []byte) (int, error) {
	c.asked.Store(true)
	return c.Conn.Write(b)
}

// Read receives.
func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && c.asked.Swap(false) {
		c.counter.trips.Add(1)
	}
	return n, err
}
