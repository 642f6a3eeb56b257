package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/rules"
)

// appliedView is what became of an apply, for programs.
type appliedView struct {
	Applied bool         `json:"applied"`
	Version int64        `json:"version"` // of the rules now
	From    time.Time    `json:"from,omitzero"`
	Changes []changeView `json:"changes"`
}

func (a *app) rulesApply() *cobra.Command {
	var f diffFlags
	var e editFlags
	cmd := a.command(cobra.Command{
		Use:   "apply",
		Short: "Store the rules of a file",
		Long: `Show how the tables differ from a file, and store the difference in one transaction once you confirm. If
someone else has changed the rules meanwhile, nothing is stored.

The change takes effect 2 seconds later in all programs, or at --from. Rules and overrides that the file lacks stay,
unless you set --delete-missing or --delete-missing-overrides. Pauses always stay.`,
		Args:    noArguments,
		Example: `  ratelimit rules apply -f rules.yaml --reason "the spring offer"`,
	}, func(ctx context.Context, _ []string) error {
		if _, err := a.edit(&e); err != nil {
			return err
		}
		document, err := a.wantedRules(ctx, f.file)
		if err != nil {
			return err
		}
		f.from = e.from.at
		return a.editRules(ctx, &e, func(_ context.Context, _ *database, list *rules.Listing) (*difference, error) {
			return a.compared(&f, list, document), nil
		})
	}, "0 done, or nothing to change")
	return a.withChange(withFile(cmd, &f), &e)
}

// store shows a difference from the rules of a version, asks, and stores it.
func (a *app) store(ctx context.Context, d *difference, version int64, edit rules.Edit) error {
	if len(d.views) == 0 {
		return a.show(appliedView{Version: version, Changes: d.views}, func(t *table) { t.row("nothing to change") })
	}
	if a.isTable() || !a.options.yes {
		if err := a.preview(d); err != nil {
			return err
		}
	}
	if err := a.confirm(ctx, "Make %s?", count(len(d.views), "change")); err != nil {
		return err
	}
	return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
		applied, err := db.apply(ctx, edit, d.changes, version)
		if err != nil {
			return err
		}
		return a.showDone(appliedView{true, applied.Version, applied.From, d.views}, func(t *table) {
			t.row(fmt.Sprintf("applied: %s, version %d, from %s on", count(len(d.views), "change"), applied.Version,
				instant(applied.From)))
			t.row("undo: " + a.undoOf("rules revert", []string{fmt.Sprint(applied.Version)}, false))
		})
	})
}

// preview shows the difference before the question. If the output is for a program, it goes to standard error.
func (a *app) preview(d *difference) error {
	var t table
	d.fill(&t)
	if !a.isTable() {
		return t.write(a.errOut)
	}
	return t.write(a.out)
}

// apply makes changes if the rules still have this version.
func (db *database) apply(ctx context.Context, edit rules.Edit, changes rules.Changes,
	version int64,
) (applied rules.Applied, err error) {
	err = pgx.BeginTxFunc(ctx, db.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		applied, err = db.store.WithTx(tx).Apply(ctx, edit, changes)
		if err == nil && applied.Version != version+1 {
			err = fmt.Errorf("someone else has changed the rules meanwhile (version %d, and it was %d); nothing was changed: look "+
				"at the difference again", applied.Version-1, version)
		}
		return err
	})
	return applied, err
}
