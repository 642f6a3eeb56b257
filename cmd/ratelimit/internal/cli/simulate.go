package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/simulate"
)

// simulateFlags are the flags of a replay.
type simulateFlags struct {
	file, refusals string
	window         spanFlag
	config         simulate.Config
}

func (a *app) simulateCommand() *cobra.Command {
	var f simulateFlags
	cmd := a.command(cobra.Command{
		Use:   "simulate -f rules.yaml [access.log ...]",
		Short: "Replay access logs against rules: who would have been refused, and when",
		Long: `Replay access logs against a rules file: who would have been refused, by which limit, and when. It uses no database. Each line
is decided as a take at the instant of the line, on buckets that are full at first. Without a file, or with -, it reads
standard input. Lines are JSON objects, or in the Common or Combined Log Format; logs can be compressed with gzip. A time without
a zone is in UTC.

Lines are decided in the order of their times. Rotated files and the logs of several servers are merged by time, in whatever
order you name them. Within a file a line may be late by up to --window, for example because it is written when a long
request ends. A log that is not in order ends with an error, because no result would be right.

The tiers of the rules select the limits for a line. Without tiers, use --by. A log contains only the requests that arrived:
refused clients might have returned. Memory grows with the number of distinct keys.`,
		Args: cobra.ArbitraryArgs,
		Example: `  ratelimit simulate -f rules.yaml --by address access.log
  ratelimit simulate -f rules.yaml --refusals refused.jsonl -o json access.log access.log.*.gz`,
	}, func(ctx context.Context, args []string) error { return a.simulate(ctx, &f, args) })
	flags := cmd.Flags()
	flags.StringVarP(&f.file, "file", "f", "", "rules file, in YAML or JSON (required); - is standard input")
	flags.StringVar(&f.refusals, "refusals", "", "file for all refusals, as lines of JSON")
	f.window = spanFlag(time.Minute)
	flags.Var(&f.window, "window", "how much a line may be earlier than the lines above it; lines of this time are held "+
		"in memory")
	flags.StringToStringVar(&f.config.Fields, "field", nil, "names of JSON fields by attribute, such as "+
		"time=ts,address=request.remote_ip")
	flags.StringArrayVar(&f.config.Routes, "route", nil, "pattern of a route, such as \"GET /search/{id}\"; several are "+
		"possible (default: the routes of the tiers)")
	flags.StringVar(&f.config.By, "by", "",
		"key in place of the tiers: address, user or a pattern such as {tenant}/{user}")
	flags.StringVar(&f.config.Limit, "limit", "", "limit of --by (default: the only limit of the rules)")
	flags.StringVar(&f.config.Plan, "plan", "", "plan of lines without a plan")
	flags.IntVar(&f.config.IPv4Bits, "ipv4-bits", 0, "bits of an IPv4 address that count (default 32)")
	flags.IntVar(&f.config.IPv6Bits, "ipv6-bits", 0, "bits of an IPv6 address that count (default 64)")
	flags.IntVarP(&f.config.Top, "top", "n", 10, "number of keys with the most refusals to print")
	a.withHashKey(cmd)
	return a.withOutput(cmd)
}

func (a *app) simulate(ctx context.Context, f *simulateFlags, args []string) (err error) {
	document, err := a.wantedRules(ctx, f.file)
	if err != nil {
		return err
	}
	if f.config.By == "" && len(document.Tiers.Tiers) == 0 {
		return misused("%s has no tiers, which say whose buckets are asked; add some, or give --by address", f.file)
	}
	config := f.config
	config.Rules = *document
	if config.Window = time.Duration(f.window); config.Window <= 0 {
		return misused("--window is %s; use 1s or more", config.Window)
	}
	if config.Top < 0 {
		return misused("--top is %d; use 0 or more", config.Top)
	}
	if config.HashKey, err = a.hashKey(); err != nil {
		return err
	}
	if f.file == standardInput && (len(args) == 0 || slices.Contains(args, standardInput)) {
		return misused("standard input cannot be both the rules and a log; name a file for one of them")
	}
	sources, err := a.sources(ctx, args)
	if err != nil {
		return err
	}
	var refusals *refusalFile
	if f.refusals != "" {
		if refusals, err = openRefusals(f.refusals, append(args, f.file)); err != nil {
			return misused("--refusals: %w", err)
		}
		defer func() { err = errors.Join(err, refusals.Close()) }()
		config.Refused = refusals.write
	}
	report, err := simulate.Run(ctx, config, sources...)
	if err == nil && refusals != nil {
		err = refusals.begin()
	}
	if err != nil {
		if errors.Is(err, simulate.ErrInvalidConfig) {
			err = misused("%w", err)
		}
		return err
	}
	a.noteProblems("could not be read", report.Unparsed)
	a.noteProblems("could not be asked", report.Failed)
	if report.WithoutPlan > 0 {
		a.note("%s had no plan, although rules are for plans; give --plan, or name the field with --field plan=NAME",
			count(report.WithoutPlan, "line"))
	}
	if report.UnknownPlan > 0 {
		a.note("%s had a plan that no rule is for", count(report.UnknownPlan, "line"))
	}
	return a.show(report, func(t *table) { fillReport(t, report) })
}

// sources returns the logs in args. "-" is the standard input, as is no argument.
func (a *app) sources(ctx context.Context, args []string) ([]simulate.Source, error) {
	if len(args) == 0 {
		if a.isTerminal() {
			return nil, misused("no log is named, and standard input is a terminal; name a file")
		}
		args = []string{standardInput}
	}
	var sources []simulate.Source
	for i, path := range args {
		if path == standardInput && slices.Contains(args[:i], path) {
			return nil, misused("standard input is named twice; name it once")
		}
		if path == standardInput {
			sources = append(sources, simulate.Reader("standard input", endsWith(ctx, a.in)))
			continue
		}
		source, err := simulate.File(path)
		if err != nil {
			return nil, misused("%w", err)
		}
		sources = append(sources, source)
	}
	return sources, nil
}

func (a *app) noteProblems(what string, p simulate.Problems) {
	if p.Count == 0 {
		return
	}
	a.note("%s %s; the first of them:", count(p.Count, "line"), what)
	for _, first := range p.First {
		a.note("  %s:%d: %s", first.Source, first.Line, first.Reason)
	}
}

func fillReport(t *table, r *simulate.Report) {
	t.field("lines", fmt.Sprint(r.Lines))
	t.field("from", instant(r.From))
	t.field("to", instant(r.To))
	t.field("admitted", fmt.Sprint(r.Admitted))
	t.field("refused", fmt.Sprint(r.Refused))
	if r.Unlimited > 0 {
		t.field("asked of no limit", fmt.Sprint(r.Unlimited))
	}
	t.field("buckets", fmt.Sprint(r.Buckets))
	if r.OutOfOrder > 0 {
		t.field("put in order", fmt.Sprintf("%s, by %s at most", count(r.OutOfOrder, "line"),
			span(time.Duration(r.StepBackUs)*time.Microsecond)))
	}
	t.gap()
	t.row("LIMIT", "ASKED", "REFUSED", "SHARE", "FIRST", "LAST", "BUSIEST SECOND")
	for _, l := range r.Limits {
		t.row(l.Limit, fmt.Sprint(l.Asked), refusedText(l.Refused, l.Shadow), fmt.Sprintf("%.1f %%", 100*l.Share),
			dash(instant(l.FirstRefusal)), dash(instant(l.LastRefusal)),
			fmt.Sprintf("%s: %d asked, %d refused", instant(l.Peak.At), l.Peak.Asked, l.Peak.Refused))
	}
	if len(r.Keys) == 0 {
		return
	}
	t.gap()
	t.row("LIMIT", "KEY", "REFUSED", "FIRST", "LAST")
	for _, k := range r.Keys {
		t.row(k.Limit, keyText(k.Key), refusedText(k.Refused, k.Shadow), instant(k.FirstRefusal), instant(k.LastRefusal))
	}
}

// refusedText returns a number of refusals, of which some were in shadow.
func refusedText(refused, shadow int64) string {
	if shadow > 0 {
		return fmt.Sprintf("%d (%d in shadow)", refused, shadow)
	}
	return fmt.Sprint(refused)
}
