package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
)

// reservationWords returns a reservation for people who look at one of its buckets.
func reservationWords(r *inspect.Reservation, limit, key string, now time.Time) string {
	took := 0.0
	for _, item := range r.Items {
		if item.Limit == limit && item.Key == key {
			took += item.Cost
		}
	}
	return fmt.Sprintf("%s: %s, %s", r.ID, number(took), lifeWords(r, now))
}

func lifeWords(r *inspect.Reservation, now time.Time) string {
	stage, at := r.Life(now)
	return strings.TrimSpace(stage + " " + instantFrom(at, now))
}

func (a *app) reservationsCommands() *cobra.Command {
	cmd := &cobra.Command{Use: "reservations", Short: "Show who has reserved tokens, and cancel reservations"}
	cmd.AddCommand(a.reservationsList(), a.reservationsCancel())
	asGroup(cmd)
	return cmd
}

func (a *app) reservationsList() *cobra.Command {
	query := inspect.ReservationQuery{}
	var key string
	cmd := a.command(cobra.Command{
		Use:   "list",
		Short: "Show reservations",
		Long: `Show reservations with their tokens and states, sorted by when they expire or, once they have ended, by when
their rows are deleted.`,
		Args:    noArguments,
		Example: "  ratelimit reservations list --limit completions --waiting",
	}, func(ctx context.Context, _ []string) error {
		switch query.State {
		case "open", "settled", "cancelled", "expired":
		case "all":
			query.State = ""
		default:
			return misused("--state is %.40q; use open, settled, cancelled, expired or all", query.State)
		}
		if err := checkMost(query.Most); err != nil {
			return err
		}
		if a.isGiven("key") {
			query.Key = &key
		}
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			found, more, err := reservations(ctx, db, query)
			if err != nil {
				return err
			}
			now, err := db.reader.Now(ctx)
			if err != nil {
				return err
			}
			if more {
				a.note("there are more; use --limit and --key, or a larger --most")
			}
			return a.showReservations(query.State, found, now)
		})
	})
	flags := cmd.Flags()
	flags.StringVar(&query.State, "state", "open", "state: open, settled, cancelled, expired or all")
	flags.StringVar(&query.Limit, "limit", "", "only reservations of this limit")
	flags.StringVar(&key, "key", "", "only reservations of this key, in its stored form")
	flags.BoolVar(&query.Waiting, "waiting", false, "only reservations that are not ready")
	flags.IntVarP(&query.Most, "most", "n", 50, "maximum number, up to 1000")
	return a.withOutput(cmd)
}

// reservations returns as many reservations as a query asks for, and whether there are more.
func reservations(ctx context.Context, db *database,
	query inspect.ReservationQuery,
) (found []inspect.Reservation, more bool, err error) {
	most := query.Most
	for {
		page, err := db.reader.Reservations(ctx, query)
		if err != nil {
			return nil, false, err
		}
		found = append(found, page.List...)
		switch {
		case page.Next == nil:
			return found, false, nil
		case len(found) >= most:
			return found, true, nil
		}
		query.After, query.Most = page.Next, most-len(found)
	}
}

func checkMost(most int) error {
	if most < 1 || most > 1000 {
		return misused("--most is %d; use 1 to 1000", most)
	}
	return nil
}

func (a *app) showReservations(state string, found []inspect.Reservation, now time.Time) error {
	none := strings.TrimSpace("there are no "+state) + " reservations"
	return showList(a, found, none, []string{"ID", "TOOK", "LIFE", "ENDS"}, func(v *inspect.Reservation) []string {
		took := make([]string, len(v.Items))
		for j, item := range v.Items {
			took[j] = fmt.Sprintf("%s of %s %s", number(item.Cost), item.Limit, shown(keyText(item.Key)))
			if item.Settled != nil {
				took[j] += ", settled with " + number(*item.Settled)
			}
		}
		return []string{v.ID, strings.Join(took, ", "), lifeWords(v, now), instantFrom(v.ExpiresAt, now)}
	})
}

// cancelledView is a reservation that was cancelled, for programs.
type cancelledView struct {
	ID    string `json:"id"`
	State string `json:"state"`
}

func (a *app) reservationsCancel() *cobra.Command {
	cmd := a.command(cobra.Command{
		Use:   "cancel ID",
		Short: "Cancel a reservation and return its tokens",
		Long: `Cancel a reservation whose work will never run, and return its tokens. Later reservations keep their times.
Work that calls Start first doesn't run then. Cancelling again changes nothing.`,
		Args:    oneArgument("an ID, as reservations list shows it"),
		Example: "  ratelimit reservations cancel 0d5f7c0e-6c0b-4f6e-9a5c-0f1f8e3d2a11 --yes",
	}, func(ctx context.Context, args []string) error {
		if err := a.confirm(ctx, "Cancel the reservation %s, so that its work does not run?", args[0]); err != nil {
			return err
		}
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			limiter, _, err := a.limiter(ctx, db)
			if err != nil {
				return err
			}
			if err := limiter.Cancel(ctx, args[0]); err != nil {
				return err
			}
			return a.showDone(cancelledView{args[0], "cancelled"}, func(t *table) { t.row("cancelled: " + args[0]) })
		})
	}, "0 done", "6 no such reservation")
	return a.withYes(a.withOutput(cmd))
}
