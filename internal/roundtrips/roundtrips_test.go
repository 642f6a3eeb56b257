package roundtrips_test

import (
	"errors"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/roundtrips"
)

func TestCounter(t *testing.T) {
	t.Parallel()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, listener.Close()) }()
	echoed := make(chan error, 1)
	go func() {
		conn, err := listener.Accept()
		if err == nil {
			_, err = io.Copy(conn, conn)
			err = errors.Join(err, conn.Close())
		}
		echoed <- err
	}()
	var counter roundtrips.Counter
	conn, err := counter.Dial(t.Context(), "tcp", listener.Addr().String())
	require.NoError(t, err)
	for range 3 {
		for range 2 { // two writes that are answered together
			_, err = conn.Write([]byte("ab"))
			require.NoError(t, err)
		}
		_, err = io.ReadFull(conn, make([]byte, 4))
		require.NoError(t, err)
	}
	require.NoError(t, conn.Close())
	require.NoError(t, <-echoed)
	require.EqualValues(t, 3, counter.Trips())
}
