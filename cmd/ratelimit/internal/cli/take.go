package cli

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// decisionView is a decision for programs.
type decisionView struct {
	Limit        string         `json:"limit"`
	Key          string         `json:"key"` // as stored
	Allowed      bool           `json:"allowed"`
	Cost         float64        `json:"cost"`
	Remaining    float64        `json:"remaining"`
	RetryAfterUs int64          `json:"retry_after_us"`
	ResetAfterUs int64          `json:"reset_after_us"`
	At           time.Time      `json:"at"`
	Policy       inspect.Policy `json:"policy"`
	DecidedBy    string         `json:"decided_by"`
	Mode         ratelimit.Mode `json:"mode"`
	PausedUntil  time.Time      `json:"paused_until,omitzero"`
	PauseReason  string         `json:"pause_reason,omitzero"`

	retryAfter, resetAfter time.Duration
	notAsked               bool
}

func (b *bucket) decisionView(d ratelimit.Decision) decisionView {
	s := d.States[0]
	return decisionView{
		Limit: b.request.Limit().Name(), Key: b.stored, Allowed: d.Allowed, Cost: s.Cost, Remaining: d.Remaining,
		RetryAfterUs: d.RetryAfter.Microseconds(), ResetAfterUs: d.ResetAfter.Microseconds(), At: d.At.UTC(),
		Policy:    inspect.Policy{Policy: s.Limit.Policy()},
		DecidedBy: inspect.DecidedBy(b.request.Limit().Name(), s.Rule, b.definedBy()), Mode: s.Mode,
		PausedUntil: s.PausedUntil, PauseReason: s.PauseReason,
		retryAfter: d.RetryAfter, resetAfter: d.ResetAfter, notAsked: s.NotAsked,
	}
}

// definedBy returns what says how the limit is defined, where no rule is named.
func (b *bucket) definedBy() string {
	if b.isStated {
		return "--policy"
	}
	return "the rule in the tables"
}

func (v *decisionView) fill(t *table) {
	said := "allowed"
	switch {
	case !v.Allowed:
		said = "refused"
	case v.Mode == ratelimit.Off:
		said = "allowed, as the limit is off"
	case v.Mode == ratelimit.Shadow:
		said = "allowed; the limit is in shadow"
	}
	t.field("answer", said)
	t.field("limit", v.Limit)
	t.field("key", keyText(v.Key))
	t.field("cost", number(v.Cost))
	if !v.notAsked {
		t.field("remaining", number(v.Remaining))
	}
	if !v.Allowed {
		t.field("retry after", span(v.retryAfter))
	}
	if !v.notAsked {
		t.field("full after", span(v.resetAfter))
	}
	t.field("paused until", instantFrom(v.PausedUntil, v.At))
	t.field("paused because", v.PauseReason)
	t.field("policy", v.Policy.String())
	t.field("decided by", v.DecidedBy)
}

// decide runs check or take, and shows the decision with show.
func (a *app) decide(
	ctx context.Context, f *bucketFlags, args []string, cost float64,
	ask func(*ratelimit.Limiter, context.Context, ...ratelimit.Request) (ratelimit.Decision, error),
	show func(any, func(*table)) error,
) error {
	return a.withBucketOf(ctx, f, args, func(ctx context.Context, _ *database, b *bucket) error {
		if b.why != nil {
			return misused("%w", b.why)
		}
		d, err := ask(b.limiter, ctx, b.request.Cost(cost))
		if err != nil {
			return forSlots(err)
		}
		v := b.decisionView(d)
		if d.Allowed {
			return show(v, v.fill)
		}
		if err := a.show(v, v.fill); err != nil {
			return err
		}
		return answer(exitRefused)
	})
}

// forSlots adds to the error of a command that does not work with slots what to do here, because this program holds
// none.
func forSlots(err error) error {
	if errors.Is(err, ratelimit.ErrInvalidRequest) {
		return fmt.Errorf("%w; programs do that, and here check says whether a slot is free, get who holds one, "+
			"and leases release gives one back", err)
	}
	return err
}

func (a *app) checkCommand() *cobra.Command {
	var f bucketFlags
	var cost float64
	cmd := a.command(cobra.Command{
		Use:   "check LIMIT [KEY]",
		Short: "Report whether a request would be allowed, and take nothing",
		Long:  "Print the answer that take would give, and take nothing. Without KEY it checks the shared bucket.",
		Args:  limitAndKey,
		Example: `  ratelimit check sendMessage ada --cost 3
  ratelimit check sendMessage ada --policy 'rate: 10, period: minute, capacity: 3'`,
	}, func(ctx context.Context, args []string) error {
		return a.decide(ctx, &f, args, cost, (*ratelimit.Limiter).Check, a.show)
	}, "0 allowed", "3 refused")
	cmd.Flags().Float64Var(&cost, "cost", 1, "tokens to check")
	return a.withOutput(a.withBucket(cmd, &f))
}

func (a *app) takeCommand() *cobra.Command {
	var f bucketFlags
	var cost float64
	cmd := a.command(cobra.Command{
		Use:   "take LIMIT [KEY]",
		Short: "Take tokens from a bucket",
		Long: `Take tokens from a bucket, as a program does: the whole cost, or nothing. Without KEY it takes from the
shared bucket. It doesn't ask for confirmation.`,
		Args:    limitAndKey,
		Example: "  ratelimit take nightlyExport && ./export.sh",
	}, func(ctx context.Context, args []string) error {
		return a.decide(ctx, &f, args, cost, (*ratelimit.Limiter).Take, a.showDone)
	}, "0 allowed", "3 refused")
	cmd.Flags().Float64Var(&cost, "cost", 1, "tokens to take")
	return a.withOutput(a.withBucket(cmd, &f))
}

// give runs reset or credit, which gives most tokens at most, and shows what the bucket holds then.
func (a *app) give(ctx context.Context, f *bucketFlags, args []string, done string, most float64,
	change func(ctx context.Context, b *bucket) error,
) error {
	return a.withBucketOf(ctx, f, args, func(ctx context.Context, db *database, b *bucket) error {
		if b.why != nil {
			return misused("%w", b.why)
		}
		before, err := b.view(ctx, db)
		if err != nil {
			return err
		}
		if err := change(ctx, b); err != nil {
			return forSlots(err)
		}
		all, err := b.view(ctx, db)
		if err != nil {
			return fmt.Errorf("the bucket is %s, but its level cannot be read: %w", done, err)
		}
		v := all.View
		return a.showDone(v, func(t *table) {
			t.field("answer", done)
			t.field("limit", v.Limit)
			t.field("key", keyText(v.Key))
			t.field("level", levelWords(v.Level))
			t.field("policy", v.Policy.String())
			t.field("undo", a.undoGift(f, args, before.Level, most))
		})
	})
}

// undoGift returns the command that takes what was given to a bucket, or nothing if none does: of slots, of debt, and
// of a bucket that was full.
func (a *app) undoGift(f *bucketFlags, args []string, before *inspect.Level, most float64) string {
	if before == nil || before.Tokens < 0 || before.Value.Limit.Spec().Kind == ratelimit.KindConcurrency {
		return ""
	}
	given := math.Floor(min(most, before.Capacity-before.Tokens)*1e6) / 1e6
	if given <= 0 {
		return ""
	}
	undo := a.undoOf("take", args, f.stored) + " --cost " + strconv.FormatFloat(given, 'f', -1, 64)
	for _, flag := range [][2]string{{"--plan", f.plan}, {"--policy", f.policy}} {
		if flag[1] != "" {
			undo += " " + flag[0] + " " + shellWord(flag[1])
		}
	}
	if f.noPlan {
		undo += " --no-plan"
	}
	return undo
}

func (a *app) resetCommand() *cobra.Command {
	var f bucketFlags
	cmd := a.command(cobra.Command{
		Use:   "reset LIMIT [KEY]",
		Short: "Fill a bucket and forget its debt",
		Long: `Fill a bucket to its capacity and forget its debt, so open reservations come on top. A pause stays: see
resume. Without KEY it fills the shared bucket.`,
		Args:    limitAndKey,
		Example: "  ratelimit reset failedLogins ada --yes",
	}, func(ctx context.Context, args []string) error {
		which := "the bucket that everybody shares"
		if len(args) > 1 {
			which = "the bucket of " + shown(args[1])
		}
		if err := a.confirm(ctx, "Fill %s of %s, and forget what it owes?", which, args[0]); err != nil {
			return err
		}
		return a.give(ctx, &f, args, "filled", math.Inf(1),
			func(ctx context.Context, b *bucket) error { return b.limiter.Reset(ctx, b.request) })
	})
	return a.withYes(a.withOutput(a.withBucket(cmd, &f)))
}

func (a *app) creditCommand() *cobra.Command {
	var f bucketFlags
	var cost float64
	cmd := a.command(cobra.Command{
		Use:   "credit LIMIT [KEY]",
		Short: "Return tokens to a bucket",
		Long: `Return tokens to a bucket, up to its capacity. A second call returns them again, so after an error use get
before you repeat it. Without KEY it returns them to the shared bucket.`,
		Args:    limitAndKey,
		Example: "  ratelimit credit sendMessage ada --cost 2",
	}, func(ctx context.Context, args []string) error {
		return a.give(ctx, &f, args, "credited", cost, func(ctx context.Context, b *bucket) error {
			return b.limiter.Credit(ctx, b.request.Cost(cost))
		})
	})
	cmd.Flags().Float64Var(&cost, "cost", 1, "tokens to return")
	return a.withOutput(a.withBucket(cmd, &f))
}
