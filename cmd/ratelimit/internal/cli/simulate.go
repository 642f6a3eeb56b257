package cli

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/simulate"
)

func (a *app) simulateCommand() *cobra.Command {
	var file string
	var config simulate.Config
	cmd := a.command(cobra.Command{
		Use:   "simulate -f rules.yaml [requests.csv]",
		Short: "Replay past requests against rules: who would have been refused, and when",
		Long: `Replay past requests against a rules file: who would have been refused, by which limit, and when. It uses no
database. It decides each request as a take at its time, on buckets that are full at first.

The requests are CSV with a head, from a file or standard input, in time order. The column time is required, as RFC
3339 or as psql prints it. The rules' tiers select a request's limits by the other columns: user, tenant, plan,
address, route, and those that the tiers name, such as header:x-tokens for a cost. Without tiers, use --by; then the
column cost is the cost, or 1.

Refused clients might have come back, which no log shows. Memory grows with the number of distinct keys.`,
		Args: cobra.MaximumNArgs(1),
		Example: `  psql --csv -c 'SELECT created_at AS time, author AS user FROM messages ORDER BY 1' |
    ratelimit simulate -f rules.yaml --by user --limit sendMessage`,
	}, func(ctx context.Context, args []string) error { return a.simulate(ctx, file, config, args) })
	flags := cmd.Flags()
	flags.StringVarP(&file, "file", "f", "", "rules file, in YAML or JSON (required); - is standard input")
	flags.StringVar(&config.By, "by", "",
		"key in place of the tiers: a column such as user, or a pattern such as {tenant}/{user}")
	flags.StringVar(&config.Limit, "limit", "", "limit of --by (default: the only limit of the rules)")
	flags.IntVarP(&config.Top, "top", "n", 10, "number of keys with the most refusals to print")
	a.withHashKey(cmd)
	return a.withOutput(cmd)
}

func (a *app) simulate(ctx context.Context, file string, config simulate.Config, args []string) error {
	path := standardInput
	if len(args) > 0 {
		path = args[0]
	}
	switch {
	case config.Top < 0:
		return misused("--top is %d; use 0 or more", config.Top)
	case file == standardInput && path == standardInput:
		return misused("standard input cannot be both the rules and the requests; name a file for one of them")
	case config.Limit != "" && config.By == "":
		return misused("--limit needs --by, which names the column with the key; give --by user, or another column")
	}
	document, err := a.wantedRules(ctx, file)
	if err != nil {
		return err
	}
	config.Rules = *document
	if config.HashKey, err = a.hashKey(); err != nil {
		return err
	}
	in, err := a.requests(ctx, path)
	if err != nil {
		return err
	}
	defer in.Close()
	report, err := simulate.Run(ctx, config, in)
	if isAny(err, simulate.ErrInvalidConfig, simulate.ErrInvalidRows) && ctx.Err() == nil {
		err = misused("%w", err)
	}
	if err != nil {
		return err
	}
	a.noteFailed(&report.Failed)
	for _, plan := range report.UnknownPlans {
		a.note("no rule is for the plan %q of some requests, although rules are for plans", plan)
	}
	return a.show(report, func(t *table) { fillReport(t, report) })
}

// requests opens the file with the requests.
func (a *app) requests(ctx context.Context, path string) (io.ReadCloser, error) {
	if path != standardInput {
		file, err := os.Open(path)
		if err != nil {
			err = misused("%w", err)
		}
		return file, err
	}
	if a.isTerminal() {
		return nil, misused("no file with requests is named, and standard input is a terminal; name a file")
	}
	return io.NopCloser(endsWith(ctx, a.in)), nil
}

func (a *app) noteFailed(p *simulate.Problems) {
	if p.Count == 0 {
		return
	}
	a.note("%s could not be decided; the first of them:", count(p.Count, "request"))
	for _, first := range p.First {
		a.note("  line %d: %s", first.Line, first.Reason)
	}
}

func fillReport(t *table, r *simulate.Report) {
	t.field("requests", fmt.Sprint(r.Rows))
	t.field("from", instant(r.From))
	t.field("to", instant(r.To))
	t.field("admitted", fmt.Sprint(r.Admitted))
	t.field("refused", fmt.Sprint(r.Refused))
	if r.Unlimited > 0 {
		t.field("asked of no limit", fmt.Sprint(r.Unlimited))
	}
	t.field("buckets", fmt.Sprint(r.Buckets))
	t.gap()
	t.row("LIMIT", "ASKED", "REFUSED", "SHARE", "FIRST", "LAST")
	for _, l := range r.Limits {
		share := 100 * float64(l.Refused) / float64(max(l.Asked, 1))
		t.row(l.Limit, fmt.Sprint(l.Asked), refusedText(l.Refusals), fmt.Sprintf("%.1f %%", share), dash(instant(l.First)),
			dash(instant(l.Last)))
	}
	if len(r.Keys) == 0 {
		return
	}
	t.gap()
	t.row("LIMIT", "KEY", "REFUSED", "FIRST", "LAST")
	for _, k := range r.Keys {
		t.row(k.Limit, keyText(k.Key), refusedText(k.Refusals), instant(k.First), instant(k.Last))
	}
}

// refusedText returns a number of refusals, of which some may be in shadow.
func refusedText(r simulate.Refusals) string {
	if r.Shadow > 0 {
		return fmt.Sprintf("%d (%d in shadow)", r.Refused, r.Shadow)
	}
	return fmt.Sprint(r.Refused)
}
