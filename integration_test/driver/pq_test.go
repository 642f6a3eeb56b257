package driver_test

import (
	"context"
	"database/sql"
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/lib/pq"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// dialing has lib/pq make connections with a function.
type dialing struct {
	pq.Dialer // is not used, because there is DialContext

	dial dial
}

func (d dialing) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	return d.dial(ctx, network, address)
}

func openPQ(t testing.TB, url string, dial dial) *sql.DB {
	t.Helper()
	connector, err := pq.NewConnector(url)
	require.NoError(t, err)
	connector.Dialer(dialing{dial: dial})
	return sql.OpenDB(connector)
}

func TestPQ(t *testing.T) {
	t.Parallel()
	run(t, testedDriver{Open: openPQ, IsOwn: func(err error) bool { return errors.As(err, new(*pq.Error)) }})
}

// With binary_parameters lib/pq sends a statement and its parameters in one message.
func TestPQWithBinaryParameters(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "runs the tests of TestPQ again")
	run(t, testedDriver{Prepares: true, Open: func(t testing.TB, url string, dial dial) *sql.DB {
		t.Helper()
		separator := "?"
		if strings.Contains(url, separator) {
			separator = "&"
		}
		return openPQ(t, url+separator+"binary_parameters=yes", dial)
	}})
}
