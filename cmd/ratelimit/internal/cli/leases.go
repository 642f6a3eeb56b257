package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// leaseWords returns a lease for people.
func leaseWords(l inspect.Lease, now time.Time) string {
	return fmt.Sprintf("%d, since %s until %s, fence %d", l.Slots, instantFrom(l.Since, now), instantFrom(l.Until, now),
		l.Fence)
}

func (a *app) leasesCommands() *cobra.Command {
	cmd := &cobra.Command{Use: "leases", Short: "End leases; get shows who holds slots"}
	cmd.AddCommand(a.leasesRelease())
	asGroup(cmd)
	return cmd
}

// releasedView is a lease that was taken back, for programs.
type releasedView struct {
	Limit string `json:"limit"`
	Key   string `json:"key"` // as stored
	Fence int64  `json:"fence"`
}

func (a *app) leasesRelease() *cobra.Command {
	var stored bool
	var fence int64
	cmd := a.command(cobra.Command{
		Use:   "release LIMIT [KEY]",
		Short: "End a lease",
		Long: `End a lease, so that its slots are free now. Use it if the holder is known to be dead. A living holder works on beside the
next holder until its next renewal fails. If the lease is on several limits, it ends on this one only.`,
		Args:    limitAndKey,
		Example: "  ratelimit leases release exports acme --fence 1767225600000000 --yes",
	}, func(ctx context.Context, args []string) error {
		if fence < 1 {
			return misused("no lease is named; give --fence, the number that ratelimit get shows")
		}
		if err := a.confirm(ctx, "Take back the slots of the lease %s of %s?", fmt.Sprint(fence), args[0]); err != nil {
			return err
		}
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			key, err := a.storedKey(ctx, db, stored, args)
			if err != nil {
				return err
			}
			err = a.release(ctx, db, args[0], key, fence)
			if errors.Is(err, ratelimit.ErrLeaseLost) {
				return notFound("there is no lease %d on this bucket of %q, or it has ended; see ratelimit get", fence,
					args[0])
			}
			if err != nil {
				return err
			}
			return a.showDone(releasedView{args[0], key, fence}, func(t *table) { t.row(fmt.Sprintf("released: %d", fence)) })
		})
	}, "0 done", "6 no such lease")
	cmd.Flags().Int64Var(&fence, "fence", 0, "fencing number of the lease (required)")
	a.withKey(cmd, &stored)
	return a.withYes(a.withOutput(cmd))
}

// release gives back the slots of a lease on a bucket.
func (a *app) release(ctx context.Context, db *database, name, key string, fence int64) error {
	limit, err := ratelimit.NewLimit(name, ratelimit.Concurrency{Slots: 1})
	if err != nil {
		return err
	}
	id, err := ratelimit.StoredLeaseID(limit.ForStoredKey(key), fence)
	if err != nil {
		return err
	}
	limiter, _, err := a.limiter(ctx, db)
	if err != nil {
		return err
	}
	return limiter.Release(ctx, id)
}
