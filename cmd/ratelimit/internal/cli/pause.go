package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/rules"
)

// editFlags say who makes a change, and why.
type editFlags struct {
	author, reason string
	from           instantFlag
}

func withEdit(cmd *cobra.Command, e *editFlags) *cobra.Command {
	cmd.Flags().StringVar(&e.author, "author", "", "author of the change, for the history (default: RATELIMIT_AUTHOR, "+
		"or the system user)")
	cmd.Flags().StringVar(&e.reason, "reason", "", "reason of the change, for the history (required)")
	return cmd
}

// edit returns who makes a change and why. It is called before anything is done.
func (a *app) edit(e *editFlags) (rules.Edit, error) {
	author := e.author
	for _, name := range []string{"RATELIMIT_AUTHOR", "SUDO_USER", "USER"} {
		if author == "" && (name == "RATELIMIT_AUTHOR" || a.env(name) != "root") {
			author = a.env(name)
		}
	}
	switch {
	case strings.TrimSpace(author) == "":
		return rules.Edit{}, misused("the change has no author; give --author, or set RATELIMIT_AUTHOR")
	case strings.TrimSpace(e.reason) == "":
		return rules.Edit{}, misused("the change has no reason; give --reason")
	}
	return rules.Edit{Author: author, Reason: e.reason, From: e.from.at}, nil
}

// changedView is a change that was made, for programs.
type changedView struct {
	Limit   string    `json:"limit"`
	Key     string    `json:"key"` // as stored; empty: every bucket of the limit
	Until   time.Time `json:"until,omitzero"`
	Author  string    `json:"author"`
	Reason  string    `json:"reason"`
	Version int64     `json:"version"`

	undo string // the command that takes it back
}

func (a *app) pauseCommand() *cobra.Command {
	var e editFlags
	var stored bool
	var lasts spanFlag
	var until instantFlag
	cmd := a.command(cobra.Command{
		Use:   "pause LIMIT [KEY]",
		Short: "Refuse every request to a limit, or to one key of it, for a time",
		Long: `Refuse every request to a limit, or to one KEY, for a time. Reserved work isn't ready before. The pause
takes effect when a program loads it, which needs Config.Policies, replaces overlapping pauses, and ends by
itself. You must confirm a pause without KEY, and one for a limit that has neither a rule nor a bucket.`,
		Args: limitAndKey,
		Example: `  ratelimit pause sendMessage ada --for 1h --reason "the key was published"
  ratelimit pause completions --until 2026-12-31T18:00:00Z --reason "the provider is down" --yes`,
	}, func(ctx context.Context, args []string) error {
		edit, err := a.edit(&e)
		switch {
		case err != nil:
			return err
		case (lasts == 0) == until.at.IsZero():
			return misused("say when the pause ends, with one of --for and --until")
		case len(args) == 1:
			if err := a.confirm(ctx, "Have every bucket of %s give nothing?", args[0]); err != nil {
				return err
			}
		}
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			return a.pause(ctx, db, edit, stored, args, time.Duration(lasts), until.at)
		})
	})
	cmd.Flags().Var(&lasts, "for", "duration, such as 10m or 2h")
	cmd.Flags().Var(&until, "until", "end, such as 2026-12-31T18:00:00Z")
	a.withKey(cmd, &stored)
	return a.withYes(a.withOutput(withEdit(cmd, &e)))
}

func (a *app) pause(ctx context.Context, db *database, edit rules.Edit, stored bool, args []string, lasts time.Duration,
	until time.Time,
) error {
	key, err := a.storedKey(ctx, db, stored, args)
	if err != nil {
		return err
	}
	if err := a.confirmUnknown(ctx, db, args[0]); err != nil {
		return err
	}
	if err := a.noteUnused(ctx, db, args[0], key); err != nil {
		return err
	}
	if lasts > 0 {
		now, err := db.reader.Now(ctx)
		if err != nil {
			return err
		}
		until = now.Add(lasts)
	}
	applied, err := db.store.Pause(ctx, edit, rules.Pause{Limit: args[0], Key: key, Until: until})
	if err != nil {
		return err
	}
	v := changedView{
		Limit: args[0], Key: key, Until: until.UTC(), Author: edit.Author, Reason: edit.Reason,
		Version: applied.Version,
	}
	v.undo = a.undoOf("resume", args, stored) + " --reason ..."
	return a.showDone(v, v.fill("paused"))
}

// confirmUnknown asks about a limit that the database does not know: it may be misspelt, or nobody has used it yet.
func (a *app) confirmUnknown(ctx context.Context, db *database, limit string) error {
	unknown, err := db.unknown(ctx, limit)
	if err != nil || unknown == "" {
		return err
	}
	a.note("%s", unknown)
	return a.confirm(ctx, "Pause %s all the same?", limit)
}

// noteUnused notes that a key has no bucket of a limit: it may be misspelt.
func (a *app) noteUnused(ctx context.Context, db *database, limit, key string) error {
	found, err := db.reader.Bucket(ctx, limit, key)
	if err == nil && key != "" && len(found.Rows) == 0 {
		a.note("the key %s has no bucket of %s now; check its spelling, unless it is new or idle", keyText(key), limit)
	}
	return err
}

// unknown returns why a limit seems to be misspelt, or "" if it has a rule, an override, a tier or a bucket.
func (db *database) unknown(ctx context.Context, limit string) (string, error) {
	list, err := db.store.List(ctx, rules.ListQuery{})
	if err != nil {
		return "", err
	}
	if of := ofLimit(&list, limit); list.Err != nil || len(of.Rules)+len(of.Overrides)+len(of.Tiers.Tiers) > 0 {
		return "", nil //nolint:nilerr // the rule that cannot be read may be one of this limit
	}
	if buckets, err := db.reader.Buckets(ctx, inspect.BucketQuery{Limit: limit, Most: 1}); err != nil || len(buckets) > 0 {
		return "", err
	}
	used, err := db.reader.Limits(ctx, "", mostNames)
	if err != nil {
		return "", err
	}
	others := namesIn(&list)
	if len(used) > 0 {
		others += ", and those with buckets are " + strings.Join(used, ", ")
	}
	return fmt.Sprintf("there is no rule and no bucket of a limit %q; check its spelling: %s", limit, others), nil
}

func (v *changedView) fill(done string) func(t *table) {
	return func(t *table) {
		t.field("answer", done)
		t.field("limit", v.Limit)
		t.field("key", keyOrAll(v.Key))
		t.field("until", instant(v.Until))
		t.field("author", v.Author)
		t.field("reason", v.Reason)
		t.field("rules version", fmt.Sprint(v.Version))
		t.field("undo", v.undo)
	}
}

// keyOrAll returns the key of a pause for people.
func keyOrAll(key string) string {
	if key == "" {
		return "(every key)"
	}
	return keyText(key)
}

func (a *app) resumeCommand() *cobra.Command {
	var e editFlags
	var stored bool
	cmd := a.command(cobra.Command{
		Use:   "resume LIMIT [KEY]",
		Short: "End a pause",
		Long: "End the pause of a limit, or of one KEY, and cancel its later pauses. A pause of the limit and a pause " +
			"of a key are separate.",
		Args:    limitAndKey,
		Example: `  ratelimit resume sendMessage ada --reason "there is a new key"`,
	}, func(ctx context.Context, args []string) error {
		edit, err := a.edit(&e)
		if err != nil {
			return err
		}
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			key, err := a.storedKey(ctx, db, stored, args)
			if err != nil {
				return err
			}
			applied, err := db.store.Resume(ctx, edit, args[0], key)
			if err != nil && !errors.Is(err, rules.ErrNotFound) {
				return err
			}
			switch more := a.noteStillPaused(ctx, db, key, args[0]); {
			case err != nil:
				return err
			case more != nil:
				return fmt.Errorf("the pause is ended, but the other pauses cannot be read: %w", more)
			}
			v := changedView{Limit: args[0], Key: key, Author: edit.Author, Reason: edit.Reason, Version: applied.Version}
			return a.showDone(v, v.fill("resumed"))
		})
	}, "0 done", "6 no such pause")
	a.withKey(cmd, &stored)
	return a.withOutput(withEdit(cmd, &e))
}

// noteStillPaused names the pauses that remain after one has ended: a user who ends the pause of a key may mean the
// limit's too.
func (a *app) noteStillPaused(ctx context.Context, db *database, key, limit string) error {
	query := rules.ListQuery{Limit: limit, Most: 1000}
	if key != "" {
		query.Key = &key
	}
	list, err := db.store.List(ctx, query)
	if err != nil {
		return err
	}
	keys := make(map[string]bool)
	for _, p := range list.Pauses {
		if p.Key == "" {
			a.note("every key of %s is still paused, until %s: resume it without a KEY", limit, instantFrom(p.Until, list.Now))
		} else {
			keys[p.Key] = true
		}
	}
	if len(keys) > 0 {
		a.note("%s of %s still paused; ratelimit rules get %s shows them", count(len(keys), "key"), limit, limit)
	}
	return nil
}
