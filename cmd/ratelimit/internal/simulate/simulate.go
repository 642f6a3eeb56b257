// Package simulate replays past requests against rules: which would have been refused, by which limit, and when. It
// needs no database. It decides each request as a Take of package ratelimit at the request's time, on buckets in memory
// that are full at first.
//
// A refused client might have returned later, or not at all, which a replay can't know.
package simulate

import (
	"bufio"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
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
	// cost is the column cost, a number above 0, or 1. It is required if the rules have no tiers.
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
// as user, plan and address, and the sources of their costs, such as header:x-tokens, which are required. Rows are in
// the order of time. Memory grows with the number of keys, not of rows. A request that cannot be decided is
// counted in the Report; with an error there is none.
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
	stated     []string // columns that the tiers' costs come from
	by         bool     // whether there is one tier, whose cost is the column cost
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
	r := &replay{by: config.By != "", counts: make(map[string]*LimitReport), keys: make(map[Bucket]*KeyReport)}
	for _, tier := range file.Tiers.Tiers {
		if tier.CostSource != "" && tier.CostSource != "fixed" {
			r.stated = append(r.stated, tier.CostSource)
		}
	}
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
func (r *replay) Observe(_ context.Context, e event.Event) {
	if found, is := e.(event.PlanWithoutRule); is {
		r.report.UnknownPlans = append(r.report.UnknownPlans, strings.Clone(found.Plan))
	}
}

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
	return rules.Tier{Limit: limit, Key: key}, nil
}

// read decides all rows.
func (r *replay) read(ctx context.Context, in io.Reader) error {
	text := bufio.NewReader(in)
	const mark = "\ufeff" // of Excel
	if begin, _ := text.Peek(len(mark)); string(begin) == mark {
		_, _ = text.Discard(len(mark))
	}
	rows := csv.NewReader(text)
	head, err := r.head(rows)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidRows, err)
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
			err = fmt.Errorf("its time %s is before the time of the row above; sort the rows by time, as ORDER BY does",
				row["time"])
		}
		cost := 1.0
		if err == nil && r.by {
			cost, err = costOf(strings.TrimSpace(row["cost"]))
		}
		if err != nil {
			return fmt.Errorf("%w: line %d: %w", ErrInvalidRows, line, err)
		}
		r.decide(ctx, line, at, row, cost)
	}
}

// head reads the names of the columns.
func (r *replay) head(rows *csv.Reader) ([]string, error) {
	head, err := rows.Read()
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	for i, name := range head {
		head[i] = strings.TrimSpace(name)
		if slices.Contains(head[:i], head[i]) {
			return nil, fmt.Errorf("the column %.80q is there twice; keep one", head[i])
		}
	}
	if !slices.Contains(head, "time") {
		return nil, errors.New("the first line is no list of columns with one called time, such as time,user,plan")
	}
	for _, name := range r.stated {
		if !slices.Contains(head, name) {
			return nil, fmt.Errorf("there is no column %q, which has the cost of a tier; add it, or rename the column with "+
				"the costs", name)
		}
	}
	return head, nil
}

func costOf(text string) (float64, error) {
	if text == "" {
		return 1, nil
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || !(n > 0) || math.IsInf(n, 1) {
		return 0, fmt.Errorf("its cost is %.40q; write a number above 0", text)
	}
	return n, nil
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

// decide decides on a row. cost is By's.
func (r *replay) decide(ctx context.Context, line int, at time.Time, row map[string]string, cost float64) {
	p := &r.report
	if p.Rows++; p.Rows == 1 {
		p.From = at
	}
	p.To = at
	requests, err := r.site.Requests(rules.Attributes{
		User: row["user"], Tenant: row["tenant"], Plan: row["plan"], Address: row["address"], Route: row["route"], More: row,
	}, func(source string) []string { return []string{row[source]} })
	if errors.Is(err, rules.ErrNoTier) {
		p.Unlimited++
		return
	}
	var d ratelimit.Decision
	if err == nil {
		if r.by {
			requests[0] = requests[0].Cost(cost)
		}
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
