package integration_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestInTxRunsAgainOnlyWhatWasUndone promises that InTx runs its function again after an error of COMMIT that means a lost
// conflict. It does not if the server relays the error of another one, as a Citus coordinator does for a worker, because the worker
// may have committed.
func TestInTxRunsAgainOnlyWhatWasUndone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, sql := range []string{
		`CREATE TABLE public.failing (code text)`,
		`CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			RAISE EXCEPTION 'on purpose' USING ERRCODE = NEW.code; END $$`,
		`CREATE CONSTRAINT TRIGGER fail AFTER INSERT ON public.failing
			DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.code <> '00000') EXECUTE FUNCTION public.fail()`,
	} {
		b.exec(t, sql)
	}
	limit := ratelimit.Define("failing", hoard(10))
	for _, test := range []struct {
		code    string
		unknown bool
		again   bool
	}{
		{"40001", false, true}, {"40P01", false, true}, {"23505", false, false}, {"XX000", true, false}, {"08006", true, false}, {"08000", true, false}, {"57P01", true, false},
	} {
		t.Run(test.code, func(t *testing.T) {
			runs := 0
			err := b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				runs++
				if _, err := b.limiter.WithTx(tx).Take(t.Context(), limit.For(test.code)); err != nil {
					return err
				}
				code := test.code
				if runs > 1 {
					code = "00000"
				}
				_, err := tx.Exec(t.Context(), fmt.Sprintf(`INSERT INTO public.failing VALUES ('%s')`, code))
				return err
			})
			require.Equal(t, test.again, err == nil)
			require.Equal(t, test.again, runs == 2, "%d runs", runs)
			if !test.again {
				require.Equal(t, test.unknown, isCommitUnknown(err), "%v", err)
			}
		})
	}
}

func isCommitUnknown(err error) bool { return errors.Is(err, ratelimit.ErrCommitUnknown) }
