// Package simulate replays access logs against rules: who would have been refused, by which limit, and when. It needs
// no database. It decides each line as a Take of package ratelimit at the instant of the line, on buckets in memory
// that are full at first.
//
// # Memory and time
//
// It reads logs as a stream. Its memory grows with the number of distinct keys: 70 to 100 bytes for a bucket whose key
// has ten bytes, and more for refused keys. In a second, a core replays about 300,000 lines of the combined format for
// one limit, 200,000 for three limits, and 120,000 lines of JSON; measure it with BenchmarkMillionLines.
//
// A line is a JSON object, or in the Common Log Format of Apache, nginx and others, with or without the referer and the
// user agent; any text may follow them.
//
// # Order
//
// Lines are decided in the order of their times. Run merges the sources, for example rotated files or the logs of
// several servers, and their order does not matter. Lines of one source may be late by up to Config.Window, because a
// server writes a line when a request ends and may stamp it with its begin. Run holds the lines of a window in memory,
// at most 256 MiB of them. A line that is earlier than a decided line ends the replay with ErrOutOfOrder, because no
// result would be right.
//
// # Limits of the method
//
// A log contains the requests that arrived. A refused client might have returned later, or not at all.
package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/address"
	"github.com/pgratelimit/pgratelimit/rules"
)

var (
	// ErrInvalidConfig is returned by Run, before it reads a log, for an invalid field of Config and for rules that
	// cannot decide on log lines. The message says what to change.
	ErrInvalidConfig = errors.New("simulate: invalid configuration")

	// ErrUnreadable is returned by Run if no line of a source could be read. The message has the first reason.
	ErrUnreadable = errors.New("simulate: no line could be read")

	// ErrOutOfOrder is returned by Run if a line is later in its source than Config.Window allows.
	ErrOutOfOrder = errors.New("simulate: the log is not in the order of time")

	// ErrUnasked is returned by Run if no line got a decision, although lines could be read. The message has the first
	// reason, or says that no tier fits.
	ErrUnasked = errors.New("simulate: no line could be asked")
)

// Config holds the settings of Run. Only Rules is required.
type Config struct {
	// Rules is the rules file. The rules are in effect for the whole log; overrides end at their Until.
	Rules rules.Document
	// Window is how much a line may be earlier than a line above it in its source. Defaults to a minute.
	Window time.Duration
	// Fields are the names of JSON fields by attribute: time, address, user, tenant, plan, method, path, route, or
	// another attribute that a tier names. A dot selects a field of an object: request.remote_ip. Defaults to the names
	// that DefaultFields returns, and for other attributes to their own names.
	Fields map[string]string
	// Routes are patterns of net/http.ServeMux, such as "GET /search/{id}". The route of a request is the pattern that
	// matches it, or otherwise its method and path. Defaults to the routes of the tiers.
	Routes []string
	// By replaces the tiers: each line costs 1, and the key is this attribute, such as "address", or a pattern such as
	// "{tenant}/{user}". It is required if the rules have no tiers.
	By string
	// Limit is the limit of By. Defaults to the only limit of the rules.
	Limit string
	// Plan is the plan of lines without a plan. Defaults to none.
	Plan string
	// HashKey is the HashKey of ratelimit.Config, for overrides of hashed keys. The report then has hashed keys, too.
	// Defaults to none.
	HashKey []byte
	// IPv4Bits and IPv6Bits are the bits of an address that count, as in httplimit.Bits. Defaults to 32 and 64.
	IPv4Bits, IPv6Bits int
	// Top is the number of keys in the report. Defaults to none.
	Top int
	// Refused receives each refusal, in the order of the lines. If it returns an error, the replay ends. Defaults to
	// nil.
	Refused func(Refusal) error
}

// Run replays the sources as one log, in the order of time. It counts invalid lines in the Report and skips them. The
// error wraps ErrInvalidConfig, ErrOutOfOrder, ErrUnreadable or ErrUnasked, or it is the error of a source, of
// Config.Refused or of ctx. With an error Run also returns the Report up to then, except with ErrInvalidConfig.
func Run(ctx context.Context, config Config, sources ...Source) (*Report, error) {
	config = config.withDefaults()
	if err := config.validate(sources); err != nil {
		return nil, err
	}
	r, err := newReplay(&config)
	if err != nil {
		return nil, err
	}
	if err := r.replay(ctx, sources); err != nil {
		if errors.Is(err, ErrInvalidConfig) {
			return nil, err
		}
		return r.end(), err
	}
	report := r.end()
	return report, r.none()
}

// none returns an error if a source has lines and all of them are invalid, or if no line was decided.
func (r *replay) none() error {
	for _, s := range r.merge.all {
		if s.invalid.Count > 0 && s.latest.IsZero() {
			first := s.invalid.First[0]
			return fmt.Errorf("%w: line %d of %s: %s; say the names of the JSON fields, or write the log as JSON, a line "+
				"each",
				ErrUnreadable, first.Line, first.Source, first.Reason)
		}
	}
	if p := &r.report; p.Failed.Count > 0 && p.Unparsed.Count+p.Failed.Count == p.Lines {
		first := p.Failed.First[0]
		return fmt.Errorf("%w: line %d of %s: %s; say the names of the JSON fields, or ask for what the lines have",
			ErrUnasked, first.Line, first.Source, first.Reason)
	}
	if p := &r.report; p.Unlimited > 0 && p.Decided == 0 {
		return fmt.Errorf("%w: no tier fits any of %d lines by its key, when and route; say the names of the JSON fields, "+
			"or ask by what the lines have, such as address",
			ErrUnasked, p.Unlimited)
	}
	return nil
}

func (c Config) withDefaults() Config {
	c.Window = cmp.Or(c.Window, time.Minute)
	c.IPv4Bits = cmp.Or(c.IPv4Bits, address.IPv4Bits)
	c.IPv6Bits = cmp.Or(c.IPv6Bits, address.IPv6Bits)
	return c
}

func (c *Config) validate(sources []Source) error {
	switch {
	case c.IPv4Bits < 1 || c.IPv4Bits > 32:
		return fmt.Errorf("%w: %d bits of an IPv4 address are to count; use 1 to 32", ErrInvalidConfig, c.IPv4Bits)
	case c.IPv6Bits < 1 || c.IPv6Bits > 64:
		return fmt.Errorf("%w: %d bits of an IPv6 address are to count; use 1 to 64; with more, one host has many buckets",
			ErrInvalidConfig, c.IPv6Bits)
	case c.Limit != "" && c.By == "":
		return fmt.Errorf("%w: the limit %.80q is named, and not by what it is asked; say by address, or by another attribute", ErrInvalidConfig, c.Limit)
	case c.Window < 0:
		return fmt.Errorf("%w: the window is %s; use 1s or more", ErrInvalidConfig, c.Window)
	case len(sources) == 0:
		return fmt.Errorf("%w: there is no log; pass a file, or what Reader returns", ErrInvalidConfig)
	}
	return nil
}
