package cli

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func (a *app) overrideCommands() *cobra.Command {
	cmd := &cobra.Command{Use: "override", Short: "Give one key its own policy, or remove it"}
	cmd.AddCommand(a.overrideSet(), a.overrideDelete())
	asGroup(cmd)
	return cmd
}

// overrideFlags say which override is meant.
type overrideFlags struct {
	editFlags
	bucketFlags
	rules.Override
	onChange, says string
	lasts          spanFlag
	until          instantFlag
}

func (a *app) overrideSet() *cobra.Command {
	var f overrideFlags
	cmd := a.command(cobra.Command{
		Use:   "set LIMIT [KEY]",
		Short: "Give one key its own policy",
		Long: `Give one key a multiple of its rule, another plan, or its own policy. You see what the key will have, and
confirm. It replaces the key's override; other keys' overrides stay. Without KEY it's for the shared bucket.`,
		Args: limitAndKey,
		Example: `  ratelimit override set sendMessage acme --multiplier 5 --for 24h --reason "their launch"
  ratelimit override set sendMessage acme --policy 'rate: 500, period: hour' --reason "a new contract"`,
	}, func(ctx context.Context, args []string) error {
		o, err := f.override(args[0])
		if err != nil {
			return err
		}
		return a.editRules(ctx, &f.editFlags,
			func(ctx context.Context, db *database, list *rules.Listing) (*difference, error) {
				return a.overridden(ctx, db, list, &f, o, args)
			})
	}, "0 done, or nothing to change", "6 no such limit")
	flags := cmd.Flags()
	flags.Float64Var(&f.Multiplier, "multiplier", 0, "multiple of the rule, such as 5 or 0.5")
	flags.StringVar(&f.OnPlan, "on-plan", "", "plan whose rule the key has")
	flags.StringVar(&f.says, "policy", "", "the key's own policy, such as 'rate: 500, period: hour'; see ratelimit help policies")
	flags.StringVar(&f.onChange, "on-change", "",
		"what becomes of its tokens: carry, keep, scale, add or reset (default: carry for a window, keep for a token bucket)")
	flags.Var(&f.lasts, "for", "duration, such as 24h")
	flags.Var(&f.until, "until", "end, such as 2026-12-31T18:00:00Z")
	a.withKey(cmd, &f.stored)
	return a.withChange(cmd, &f.editFlags)
}

// override returns the override that the flags say, without its key and the end that --for says.
func (f *overrideFlags) override(limit string) (o rules.Override, err error) {
	o = f.Override
	o.Limit, o.OnChange, o.Until = limit, ratelimit.OnChange(f.onChange), f.until.at
	if f.says != "" {
		if o.Policy, err = parsePolicy(f.says); err != nil {
			return o, err
		}
	}
	switch {
	case o.Multiplier == 0 && o.OnPlan == "" && o.Policy == nil:
		return o, misused("the override changes nothing; give one of --multiplier, --on-plan and --policy")
	case f.lasts != 0 && !f.until.at.IsZero():
		return o, misused("there are two ends; give one of --for and --until")
	}
	return o, o.Validate()
}

// overridden returns the difference with an override.
func (a *app) overridden(
	ctx context.Context, db *database, list *rules.Listing, f *overrideFlags, o rules.Override, args []string,
) (d *difference, err error) {
	if unknown, err := db.unknown(ctx, o.Limit); err != nil || unknown != "" {
		return nil, cmp.Or(err, notFound("%s; rules apply stores an override of a limit that is not used yet", unknown))
	}
	if o.Key, err = a.storedKey(ctx, db, f.stored, args); err != nil {
		return nil, err
	}
	if err := a.noteUnused(ctx, db, o.Limit, o.Key); err != nil {
		return nil, err
	}
	if f.lasts != 0 {
		o.Until = list.Now.Add(time.Duration(f.lasts)).Truncate(time.Second)
	}
	d = (&diffFlags{from: f.from.at}).between(list, &rules.Document{Overrides: []rules.Override{o}})
	if len(d.ended) > 0 {
		return nil, misused("the override ends at %s, which is past; give a later --until", instant(o.Until))
	}
	return d, a.foresee(ctx, db, d, list, &f.bucketFlags, args)
}

// foresee sets what a change of a key's override leaves in its bucket, or notes that its level isn't known.
func (a *app) foresee(
	ctx context.Context, db *database, d *difference, list *rules.Listing, f *bucketFlags, args []string,
) error {
	b, err := a.bucket(ctx, db, f, args)
	if err != nil {
		return err
	}
	defer a.noteUnknown(d)
	v, err := b.view(ctx, db)
	if err != nil || v.Level == nil || len(d.views) == 0 {
		return err
	}
	plan, c := "", &d.views[0]
	if c.New == nil && !slices.ContainsFunc(list.Overrides, func(s rules.Statement) bool {
		return thingOf(&s) == thing{c.Of, c.Limit, "", c.Key} && !s.From.After(list.Now)
	}) { // it lies ahead
		c.Outlook, d.unknown = "", 0
		return nil
	}
	if v.Seen != nil {
		plan = v.Seen.Plan
	}
	without := func(plan string) ratelimit.Policy { return rules.PolicyIn(list.Rules, c.Limit, plan, list.Now) }
	next := without(plan)
	if o, ok := c.New.(*rules.Override); ok {
		next = o.PolicyOn(plan, without)
	}
	if next != nil {
		c.Outlook, d.unknown = rules.Outlook(v.Policy.Policy, next, onChangeOf(c.New, c.Old), b.now, max(v.Tokens, 0)), 0
	}
	return nil
}

func (a *app) overrideDelete() *cobra.Command {
	var f overrideFlags
	cmd := a.command(cobra.Command{
		Use:   "delete LIMIT [KEY]",
		Short: "Remove one key's override",
		Long: `Delete one key's override, so its rule decides again. You see what the key will have, and confirm. Without
KEY it's the shared bucket's override.`,
		Args:    limitAndKey,
		Example: `  ratelimit override delete sendMessage acme --reason "the launch is over"`,
	}, func(ctx context.Context, args []string) error {
		return a.editRules(ctx, &f.editFlags,
			func(ctx context.Context, db *database, list *rules.Listing) (*difference, error) {
				key, err := a.storedKey(ctx, db, f.stored, args)
				if err != nil {
					return nil, err
				}
				d, err := removal(list, thing{rules.OfOverride, args[0], "", key}, f.from.at)
				if err != nil {
					return nil, err
				}
				return d, a.foresee(ctx, db, d, list, &f.bucketFlags, args)
			})
	}, "0 done", "6 no such override")
	a.withKey(cmd, &f.stored)
	return a.withChange(cmd, &f.editFlags)
}
