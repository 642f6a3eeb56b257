package driver_test

import (
	"context"
	"database/sql"
	"net"
	"strings"
	"testing"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
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
	run(t, testedDriver{Open: openPQ})
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

// TestPQErrors finds in an error what lib/pq said, beside what the core looks for.
func TestPQErrors(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	sends := ratelimit.Define("sends", ratelimit.PerHour(3))
	db := openPQ(t, postgrestest.NewDatabase(t), new(net.Dialer).DialContext)
	t.Cleanup(func() { _ = db.Close() })
	limiter, err := sqllimit.New(db, ratelimit.Config{})
	require.NoError(t, err)
	loser, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelSerializable})
	require.NoError(t, err)
	defer func() { _ = loser.Rollback() }()
	_, err = loser.ExecContext(ctx, `SELECT count(*) FROM ratelimit.buckets`) // has its snapshot now
	require.NoError(t, err)
	_, err = limiter.Take(ctx, sends.For("ada"))
	require.NoError(t, err)
	for _, code := range []pqerror.Code{"40001", "25P02"} {
		_, err = sqllimit.WithTx(limiter, loser).Take(ctx, sends.For("ada"))
		var ofDriver *pq.Error
		require.ErrorAs(t, err, &ofDriver)
		require.Equal(t, code, ofDriver.Code)
		require.Equal(t, code == "40001", ratelimit.IsRetryable(err))
	}
}
