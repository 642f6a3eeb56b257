// Package simulate replays past requests against rules: which would have been refused, by which limit, and when. It
// needs no database. It decides each request as a Take of package ratelimit at the request's time, on buckets in memory
// that are full at first.
//
// A refused client might have returned later, or not at all, which a replay can't know.
package simulate

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// Errors of Run, which say what to change.
var (
	// ErrInvalidConfig is returned for rules that cannot decide, before any request is decided.
	ErrInvalidConfig = errors.New("simulate: invalid configuration")
	// ErrInvalidRows is returned for requests that cannot be read or are not in the order of time.
	ErrInvalidRows = errors.New("simulate: invalid rows")
)

// Config holds the settings of Run. Only Rules is required.
type Config struct {
	// Rules is the rules file. The rules are in effect for all requests; overrides end at their Until.
	Rules rules.Document
	// By replaces the tiers: the key is this column, such as "user", or a pattern such as "{tenant}/{user}", and the
	// cost is the column cost, or 1. It is required if the rules have no tiers.
	By string
	// Limit is the limit of By. Defaults to the only limit of the rules.
	Limit string
	// HashKey is the HashKey of ratelimit.Config, for overrides of hashed keys. The report then has hashed keys, too.
	// Defaults to none.
	HashKey []byte
	// Top is the number of keys in the report. Defaults to none.
	Top int
}

// Run replays requests from CSV: a head with the columns' names, and a row for each request. The column time is
// required: RFC 3339, or as psql prints it, and UTC if it has no zone. The others are the attributes of the tiers, such
// as user, plan and address. Rows are in the order of time. Memory grows with the number of keys, not with that of
// rows. A request that cannot be decided is counted in the Report; with an error there is none.
func Run(ctx context.Context, config Config, in io.Reader) (*Report, error) {
	r, err := newReplay(&config)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	if err := r.read(ctx, in); err != nil {
		return nil, err
	}
	return r.end(config.Top)
}

// replay is one replay.
type replay struct {
	site       *rules.Site
	simulation *ratelimit.Simulation
	refused    []ratelimit.Refusal // of the current row
	counts     map[string]*LimitReport
	keys       map[Bucket]*KeyReport
	report     Report
}

func newReplay(config *Config) (*replay, error) {
	file := config.Rules
	if config.By != "" {
		tier, err := config.tier()
		if err != nil {
			return nil, err
		}
		file.Tiers = rules.TierSet{Tiers: []rules.Tier{tier}}
	}
	if len(file.Tiers.Tiers) == 0 {
		return nil, errors.New("the rules have no tiers, which select the limits; add some, or say by which " +
			"column, such as user")
	}
	r := &replay{counts: make(map[string]*LimitReport), keys: make(map[Bucket]*KeyReport)}
	set, err := rules.SetOf(file, r)
	if err != nil {
		return nil, err
	}
	if r.site, err = rules.NewSite(set, rules.SiteConfig{Attributes: file.Attributes()}); err != nil {
		return nil, err
	}
	r.simulation, err = ratelimit.NewSimulation(ratelimit.Config{
		Policies: set, HashKey: config.HashKey,
		Refused: func(_ context.Context, refusal ratelimit.Refusal) { r.refused = append(r.refused, refusal) },
	})
	return r, err
}

// Observe remembers plans that no rule is for.
func (r *replay) Observe(_ context.Context, event ratelimit.Event) {
	if found, is := event.(ratelimit.PlanWithoutRule); is {
		r.report.UnknownPlans = append(r.report.UnknownPlans, strings.Clone(found.Plan))
	}
}

// costColumn is the source of the cost of By.
const costColumn = "header:cost"

func (c *Config) tier() (rules.Tier, error) {
	limit := c.Limit
	if limit == "" {
		limits := make(map[string]bool)
		for i := range c.Rules.Rules {
			limits[c.Rules.Rules[i].Limit] = true
		}
		names := slices.Sorted(maps.Keys(limits))
		if len(names) != 1 {
			return rules.Tier{}, fmt.Errorf("name the limit to ask by %.80q, because the rules have %d: %s", c.By, len(names),
				strings.Join(names[:min(len(names), 10)], ", "))
		}
		limit = names[0]
	}
	key := c.By
	if !strings.Contains(key, "{") {
		key = "{" + key + "}"
	}
	return rules.Tier{Limit: limit, Key: key, CostSource: costColumn}, nil
}

// read decides all rows.
func (r *replay) read(ctx context.Context, in io.Reader) error {
	rows := csv.NewReader(in)
	head, err := rows.Read()
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: %w", ErrInvalidRows, err)
	}
	if !slices.Contains(head, "time") {
		return fmt.Errorf("%w: the first line is no list of columns with one called time, such as time,user,plan",
			ErrInvalidRows)
	}
	for {
		cells, err := rows.Read()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("simulate: %w", ctx.Err())
		case err != nil:
			return fmt.Errorf("%w: %w", ErrInvalidRows, err)
		}
		row := make(map[string]string, len(head))
		for i, name := range head {
			row[name] = cells[i]
		}
		line, _ := rows.FieldPos(0)
		at, err := timeOf(row["time"])
		if err == nil && at.Before(r.report.To) {
			err = fmt.Errorf("its time %s is before that of the row above; sort the rows by time, as ORDER BY does",
				row["time"])
		}
		if err != nil {
			return fmt.Errorf("%w: line %d: %w", ErrInvalidRows, line, err)
		}
		r.decide(ctx, line, at, row)
	}
}

// timeOf reads a time as RFC 3339 or psql write it.
func timeOf(text string) (time.Time, error) {
	for _, layout := range []string{
		time.RFC3339, "2006-01-02 15:04:05Z07", "2006-01-02 15:04:05Z07:00", "2006-01-02 15:04:05", "2006-01-02T15:04:05",
	} {
		if at, err := time.Parse(layout, text); err == nil {
			return at, nil
		}
	}
	return time.Time{}, fmt.Errorf("its time is %.40q; write it as 2026-12-31T18:00:00Z", text)
}

// decide decides on a row.
func (r *replay) decide(ctx context.Context, line int, at time.Time, row map[string]string) {
	p := &r.report
	if p.Rows++; p.Rows == 1 {
		p.From = at
	}
	p.To = at
	stated := func(source string) []string {
		if source == costColumn && row[source] == "" {
			source = "cost"
		}
		return []string{row[source]}
	}
	requests, err := r.site.Requests(rules.Attributes{
		User: row["user"], Tenant: row["tenant"], Plan: row["plan"], Address: row["address"], Route: row["route"], More: row,
	}, stated)
	if errors.Is(err, rules.ErrNoTier) {
		p.Unlimited++
		return
	}
	var d ratelimit.Decision
	if err == nil {
		r.refused = r.refused[:0]
		d, err = r.simulation.At(at).Take(context.WithoutCancel(ctx), requests...)
	}
	if err != nil {
		p.Failed.add(line, err)
		return
	}
	if d.Allowed {
		p.Admitted++
	} else {
		p.Refused++
	}
	r.count(at, &d)
}
