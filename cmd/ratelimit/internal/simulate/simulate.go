// Package simulate replays access logs against rules: who would have been refused, by which limit, and when. It needs no
// database. Each line of a log is decided as package ratelimit decides a Take at the line's instant, on buckets in memory
// that are full at first.
//
// # What it keeps and costs
//
// Logs are read as a stream. What is kept grows with the distinct keys only: 70 to 100 bytes for a bucket whose key has ten,
// the more with a million of them, and some more for one that has refused. A core replays about 300,000 lines of the combined format in a second for one limit,
// 200,000 for three, and 120,000 of JSON; BenchmarkMillionLines says how to measure it.
//
// # Lines that are out of order
//
// A server writes a line when a request is over, and most write the instant at which it began, so that lines step back.
// Each line is decided at its own instant. Where that is before the last change of a bucket it counts as that change: no
// token arrives, and none is taken back. Where it is more than a minute and a window before it, the clock is taken to have
// been wrong, as a Limiter does, and the bucket goes on from the line. Report.OutOfOrder counts the lines that step back, and
// Report.StepBack says by how much: sort a log that steps back by more than a few seconds.
//
// # What it does not know
//
// A log holds the requests that came. Who had been refused might have come later, or not at all.
package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/pgratelimit/pgratelimit/internal/address"
	"github.com/pgratelimit/pgratelimit/rules"
)

// defaultTop is how many keys a report names.
const defaultTop = 10

var (
	// ErrInvalidConfig is returned by Run, before anything is read, when a field of the Config cannot be used, or the rules
	// cannot be asked of log lines; the message says what to change.
	ErrInvalidConfig = errors.New("simulate: invalid configuration")

	// ErrUnreadable is returned by Run when no line of the logs could be read; the message has the first reason.
	ErrUnreadable = errors.New("simulate: no line could be read")

	// ErrUnasked is returned by Run when lines could be read, and limits be asked for none of them; the message has the
	// first reason.
	ErrUnasked = errors.New("simulate: no line could be asked")
)

// Format is how a line of a log is written.
type Format string

const (
	// Detect takes the format that the first lines are in. It is what the empty Format means.
	Detect Format = "detect"
	// Common is the Common Log Format of Apache, nginx and others, with the name of the server before it or not. Anything may
	// follow the size.
	Common Format = "common"
	// Combined is Common with the referer and the user agent, as nginx writes it by default.
	Combined Format = "combined"
	// JSON is an object on each line.
	JSON Format = "json"
)

// Config says what is replayed. Rules are all that it needs.
type Config struct {
	// Rules are what rules.ReadFile returned. They count as if they had always held; overrides end when they say so.
	Rules rules.Document
	// Format is how the lines are written. Defaults to Detect.
	Format Format
	// Fields are names of JSON fields, by the attribute that they hold: time, address, user, tenant, plan, method, path,
	// route, or any other that a tier names. A dot goes into an object: request.remote_ip. Defaults to the names that
	// DefaultFields returns, and for every other attribute to its own name.
	Fields map[string]string
	// Routes are patterns of net/http.ServeMux, such as "GET /search/{id}". The route of a request is the pattern that
	// matches it. Defaults to the routes that the tiers name. A request that none matches has its method and path.
	Routes []string
	// By is the attribute whose buckets are asked, such as "address", or a pattern of them such as "{tenant}/{user}", at
	// a cost of 1 for each line, in place of the tiers. It is needed where the rules have no tiers.
	By string
	// Limit is the limit that By asks. Defaults to the only one that the rules have.
	Limit string
	// Plan is the plan of requests whose line names none. Defaults to none.
	Plan string
	// HashKey is that of ratelimit.Config, for rules whose overrides name keys as they are stored under it. The keys of the
	// report are then as stored, too. Defaults to none.
	HashKey []byte
	// IPv4Bits and IPv6Bits are how much of an address counts, as httplimit.Bits. Defaults to 32 and 64.
	IPv4Bits, IPv6Bits int
	// Top is how many keys the report names. Defaults to 10; below 0 it names none.
	Top int
	// Refused is told of each refusal, in the order of the lines. Its error ends the replay. Defaults to nil, nobody.
	Refused func(Refusal) error
}

// Run replays the sources, one after the other as one log. Lines with which something is wrong are counted in the Report
// and left out. It returns an error that wraps ErrInvalidConfig, ErrUnreadable or ErrUnasked, that of a source which cannot
// be opened or read, that of Config.Refused, or that of ctx, which is asked between lines; with the Report as far as it got,
// which is nil for ErrInvalidConfig only.
func Run(ctx context.Context, config Config, sources ...Source) (*Report, error) {
	config = config.withDefaults()
	if err := config.validate(sources); err != nil {
		return nil, err
	}
	r, err := newReplay(&config)
	if err != nil {
		return nil, err
	}
	for i := range sources {
		if err := r.replay(ctx, &sources[i]); err != nil {
			return r.end(), err
		}
	}
	report := r.end()
	return report, report.none()
}

// none returns an error where there were lines, and something is wrong with all of them.
func (r *Report) none() error {
	switch {
	case r.Lines == 0 || r.Unparsed.Count+r.Failed.Count < r.Lines:
		return nil
	case r.Failed.Count == 0:
		first := r.Unparsed.First[0]
		return fmt.Errorf("%w: line %d of %s: %s; say the format, or the names of the JSON fields, or write the log as JSON, a line each",
			ErrUnreadable, first.Line, first.Source, first.Reason)
	default:
		first := r.Failed.First[0]
		return fmt.Errorf("%w: line %d of %s: %s; say the names of the JSON fields, or ask for what the lines have",
			ErrUnasked, first.Line, first.Source, first.Reason)
	}
}

func (c Config) withDefaults() Config {
	c.Format = cmp.Or(c.Format, Detect)
	c.IPv4Bits = cmp.Or(c.IPv4Bits, address.IPv4Bits)
	c.IPv6Bits = cmp.Or(c.IPv6Bits, address.IPv6Bits)
	c.Top = max(cmp.Or(c.Top, defaultTop), 0)
	return c
}

func (c *Config) validate(sources []Source) error {
	switch c.Format {
	case Detect, Common, Combined, JSON:
	default:
		return fmt.Errorf("%w: the format is %.20q; use detect, common, combined or json", ErrInvalidConfig, string(c.Format))
	}
	switch {
	case c.IPv4Bits < 1 || c.IPv4Bits > 32:
		return fmt.Errorf("%w: %d bits of an IPv4 address are to count; use 1 to 32", ErrInvalidConfig, c.IPv4Bits)
	case c.IPv6Bits < 1 || c.IPv6Bits > 128:
		return fmt.Errorf("%w: %d bits of an IPv6 address are to count; use 1 to 128", ErrInvalidConfig, c.IPv6Bits)
	case c.Limit != "" && c.By == "":
		return fmt.Errorf("%w: the limit %.80q is named, and not by what it is asked; say by address, or by another attribute", ErrInvalidConfig, c.Limit)
	case len(sources) == 0:
		return fmt.Errorf("%w: there is no log; pass a file, or what Reader returns", ErrInvalidConfig)
	}
	return nil
}
