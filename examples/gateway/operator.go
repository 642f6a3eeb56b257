package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// raisePlan gives the pro plan 1800 tokens a minute in every gateway, from an instant on that the answer names.
func raisePlan(ctx context.Context, store *rules.Store) (rules.Applied, error) {
	edit := rules.Edit{Author: "grace", Reason: "the spring offer"}
	return store.Put(ctx, edit, rules.Rule{Limit: "gateway.key", Plan: "pro", Rate: 1800, Period: time.Minute, Unit: "tokens"})
}

// raiseKey gives one customer twice what his plan gives, from the instant on. The key is as Limiter.StoredKey returns it.
func raiseKey(ctx context.Context, store *rules.Store, key string, from time.Time) error {
	edit := rules.Edit{Author: "grace", Reason: "he pays for two", From: from}
	_, err := store.Override(ctx, edit, rules.Override{Limit: "gateway.key", Key: key, Multiplier: 2})
	return err
}

// pauseKey gives one customer nothing until the instant, and begins at once.
func pauseKey(ctx context.Context, store *rules.Store, key string, until time.Time) error {
	edit := rules.Edit{Author: "ada", Reason: "his key was published"}
	_, err := store.Pause(ctx, edit, rules.Pause{Limit: "gateway.key", Key: key, Until: until})
	return err
}

// resumeKey ends the pause.
func resumeKey(ctx context.Context, store *rules.Store, key string) error {
	_, err := store.Resume(ctx, rules.Edit{Author: "ada", Reason: "he has a new one"}, "gateway.key", key)
	return err
}

// printHistory prints who changed what of the limit, when and why, the newest first.
func printHistory(ctx context.Context, w io.Writer, store *rules.Store) error {
	entries, err := store.History(ctx, rules.HistoryQuery{Limit: "gateway.key"})
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "\n%-7s  %-12s  %-7s  %-35s  %s\n", "version", "holds from", "author", "what", "why")
	for i := range entries {
		e := &entries[i]
		fmt.Fprintf(w, "%-7d  %-12s  %-7s  %-35s  %s\n", e.Version, e.From.Format("15:04:05.000"), e.Author, inWords(e), e.Reason)
	}
	return nil
}

// inWords says what an entry of the history states.
func inWords(e *rules.Entry) string {
	switch {
	case e.Rule != nil:
		return fmt.Sprintf("plan %s: %v", e.Plan, ratelimit.TokenBucket{Rate: e.Rule.Rate, Period: e.Rule.Period})
	case e.Override != nil:
		return fmt.Sprintf("one key: %v times its plan", e.Override.Multiplier)
	case e.Pause != nil:
		return "one key: paused until " + e.Pause.Until.Format("15:04:05.000")
	}
	return "one key: " + e.Of + " taken away"
}
