package integration_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// execModes are the modes in which pgx sends statements.
var execModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// An error of the server in the message of COMMIT says that nothing was written: a conflict is tried again, and another error is returned. On
// the same connection, which was rolled back. An error of a server behind the server leaves the outcome unknown.
func TestAnErrorInTheMessageOfCommit(t *testing.T) {
	t.Parallel()
	for at, timing := range map[string]string{"AtTheInsert": "", "AtTheCommit": "DEFERRABLE INITIALLY DEFERRED"} {
		for code, unknown := range map[string]bool{"40001": false, "40P01": false, "55P03": false, "23505": false, "XX000": true} {
			t.Run(at+"/"+code, func(t *testing.T) {
				t.Parallel()
				representative(t, code, "40001", "23505")
				b := setup(t, oneConnection)
				takeAll(t, b.limiter, roomy.For("first").Cost(1))
				b.exec(t, `CREATE SEQUENCE public.attempts`)
				b.exec(t, `CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
					IF nextval('public.attempts') = 1 THEN RAISE EXCEPTION 'on purpose' USING ERRCODE = '`+code+`'; END IF; RETURN NULL; END $$`)
				b.exec(t, `CREATE CONSTRAINT TRIGGER fail AFTER INSERT ON ratelimit.reservations `+timing+` FOR EACH ROW EXECUTE FUNCTION public.fail()`)
				_, err := b.limiter.Reserve(t.Context(), roomy.For("ada"), other.For("ada"))
				taken := 0
				switch {
				case unknown:
					require.ErrorIs(t, err, ratelimit.ErrCommitUnknown)
				case code == "23505":
					require.Equal(t, code, sqlstate(err))
					require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
				case code == "55P03" && at == "AtTheCommit": // COMMIT itself waits for no row
					require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
				default:
					require.NoError(t, err)
					taken = 1
				}
				require.Len(t, b.reserved(t), taken)
				require.Len(t, b.rows(t, "ada"), 2*taken)
				b.requireNothingOpen(t)
				require.EqualValues(t, 1, b.pool.Stat().NewConnsCount(), "the connection was rolled back, not thrown away")
			})
		}
	}
}

// A call whose last statement waits for a lock returns an error that says that nothing was written when its context ends. COMMIT, which is in the
// same message, does not make the outcome unknown.
func TestACallThatWaitsInTheMessageOfCommit(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "each call waits for a second")
	reserved := []ratelimit.Request{roomy.For("ada").Cost(3), other.For("ada")}
	for name, test := range map[string]struct {
		lock string
		call func(ctx context.Context, limiter *ratelimit.Limiter, id string) error
	}{
		"ReserveForItsTable": {`LOCK TABLE ratelimit.reservations IN SHARE MODE`, func(ctx context.Context, limiter *ratelimit.Limiter, _ string) error {
			_, err := limiter.Reserve(ctx, roomy.For("ben"))
			return err
		}},
		"SettleForARow": {`SELECT FROM ratelimit.buckets WHERE name = 'roomy' FOR UPDATE`, func(ctx context.Context, limiter *ratelimit.Limiter, id string) error {
			return limiter.Settle(ctx, id, roomy.For("ada").Cost(1))
		}},
		"CancelForTheSecondRow": {`SELECT FROM ratelimit.buckets WHERE name = 'roomy' FOR UPDATE`, func(ctx context.Context, limiter *ratelimit.Limiter, id string) error {
			return limiter.Cancel(ctx, id)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			r, err := b.limiter.Reserve(t.Context(), reserved...)
			require.NoError(t, err)
			holder := b.begin(t, pgx.ReadCommitted)
			_, err = holder.Exec(t.Context(), test.lock)
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			err = test.call(ctx, b.limiter, r.ID)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
			require.Equal(t, ratelimit.Open, ratelimit.ReservationState(b.reserved(t)[0].State))
			require.Len(t, b.reserved(t), 1)

			ended := make(chan error, 1)
			go func() { ended <- test.call(t.Context(), b.limiter, r.ID) }()
			select {
			case err := <-ended:
				require.FailNow(t, "it did not wait", "%v", err)
			case <-time.After(1500 * time.Millisecond): // longer than the message of COMMIT waits
			}
			require.NoError(t, holder.Commit(t.Context()))
			require.NoError(t, <-ended)
			left := map[bool]float64{true: 1e6, false: 1e6 - 1}
			if !strings.HasPrefix(name, "Reserve") {
				require.InDelta(t, left[name == "CancelForTheSecondRow"], b.held(t, "roomy", "ada"), 0.01)
			}
			b.requireNothingOpen(t)
		})
	}
}
