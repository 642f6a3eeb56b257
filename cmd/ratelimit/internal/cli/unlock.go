package cli

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/ratelimit/lockout"
)

// unlockedView is a lock that was ended, for programs.
type unlockedView struct {
	Limit       string    `json:"limit"`
	Key         string    `json:"key"`                   // as stored
	LockedUntil time.Time `json:"locked_until,omitzero"` // zero: it was not locked
}

func (a *app) unlockCommand() *cobra.Command {
	var isStored bool
	cmd := a.command(cobra.Command{
		Use:   "unlock LOCK KEY",
		Short: "Unlock a key that package lockout has locked",
		Long: `End a key's lock, and forget its past locks, which make the next one longer, once you confirm. LOCK is the
lock's name in the program, as in lockout.Define. The attempts' limit stays as it is: see ratelimit key.`,
		Args:    lockAndKey,
		Example: "  ratelimit unlock login.locked ada",
	}, func(ctx context.Context, args []string) error {
		lock, err := lockout.New(args[0], lockout.Config{})
		if err != nil {
			return misused("%w", err)
		}
		if err := a.confirm(ctx, "Unlock %s of %s, and forget its past locks?", shown(args[1]), args[0]); err != nil {
			return err
		}
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			return a.unlock(ctx, db, lock, isStored, args)
		})
	}, "0 done", "6 the lock has never locked the key, or it is pruned")
	a.withKey(cmd, &isStored)
	return a.withYes(a.withOutput(cmd))
}

func lockAndKey(cmd *cobra.Command, args []string) error {
	if len(args) != 2 || args[1] == "" {
		return misused("write %s LOCK KEY, with quotes around a key that has spaces", cmd.CommandPath())
	}
	return nil
}

func (a *app) unlock(ctx context.Context, db *database, lock *lockout.Lock, isStored bool, args []string) error {
	locked, blocked := lock.Limits()[0], lock.Limits()[1]
	keyOf, err := a.keyOf(ctx, db, isStored, args[1])
	if err != nil {
		return err
	}
	key, err := keyOf(locked.Name())
	if err != nil {
		return err
	}
	keyOfBlocks, err := keyOf(blocked.Name())
	if err != nil {
		return err
	}
	stored, err := db.reader.Bucket(ctx, locked.Name(), key)
	switch {
	case err != nil:
		return err
	case len(stored.Rows) == 0:
		return notFound("%s has not locked the key %s; ratelimit key shows what refuses it", args[0], keyText(args[1]))
	}
	limiter, _, err := a.limiter(ctx, db)
	if err != nil {
		return err
	}
	first, second := locked.ForStoredKey(key), blocked.ForStoredKey(keyOfBlocks)
	level, err := db.reader.Level(ctx, limiter, first, key, "")
	switch {
	case err != nil:
		return err
	case level.Capacity > 0 || stored.Rows[0].Tokens > 0:
		return notFound("%s is no lock, because its buckets hold tokens; ratelimit reset fills them", args[0])
	}
	if err := limiter.Reset(ctx, first, second); err != nil {
		return err
	}
	return a.showDone(unlockedView{args[0], key, level.FreeAt}, func(t *table) {
		t.field("answer", "unlocked")
		t.field("lock", args[0])
		t.field("key", keyText(key))
		t.field("locked until", instantFrom(level.FreeAt, level.Value.AsOf))
	})
}
