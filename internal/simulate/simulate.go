// Package simulate replays access logs against rules: who would have been refused, by which limit, and when. It needs no
// database. Each line of a log is decided as package ratelimit decides a Take at the line's instant, on buckets in memory
// that are full at first.
//
// # What it keeps
//
// Logs are read as a stream. What is kept grows with the distinct keys only: 16 bytes of state for each bucket, with its
// key and its place in a map, and some more for each bucket that has refused. The benchmark of this package measures both.
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
	"context"
	"errors"
	"time"

	"github.com/pgratelimit/pgratelimit/rules"
)

var (
	// ErrInvalidConfig is returned by Run, before anything is read, when a field of the Config cannot be used, or the rules
	// cannot be asked of log lines; the message says what to change.
	ErrInvalidConfig = errors.New("simulate: invalid configuration")

	// ErrUnreadable is returned by Run when no line of the logs could be read; the message has the first reason.
	ErrUnreadable = errors.New("simulate: no line could be read")
)

// Format is how a line of a log is written.
type Format string

const (
	// Detect takes the format that the first lines are in. It is what the empty Format means.
	Detect Format = "detect"
	// Common is the Common Log Format of Apache, nginx and others. What follows the size is not looked at.
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
	// endpoint, or any other that a tier names. A dot goes into an object: request.remote_ip. Defaults to the names that
	// DefaultFields returns, and for every other attribute to its own name.
	Fields map[string]string
	// Routes are patterns of net/http.ServeMux, such as "GET /search/{id}". The endpoint of a request is the pattern that
	// matches it. Defaults to the endpoints that the tiers name. A request that none matches has its method and path.
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
	// Progress is told how far the replay is, some times a second while lines come, and at its end. Defaults to nil.
	Progress func(Progress)
}

// Refusal is a limit that refused a line.
type Refusal struct {
	Time       time.Time     `json:"time"`
	Limit      string        `json:"limit"`
	Key        string        `json:"key"`            // as stored; empty: the bucket that everybody shares
	Rule       string        `json:"rule,omitempty"` // the name of the rule that decided
	Cost       float64       `json:"cost"`
	RetryAfter time.Duration `json:"-"`
	Shadow     bool          `json:"shadow,omitempty"` // whether the limit is on trial, so that nobody is turned away
	Source     string        `json:"source"`
	Line       int64         `json:"line"` // from 1 on, in its source
}

// Progress is how far a replay is.
type Progress struct {
	// Lines are those that were read, and Bytes what was read of the sources, as they are stored.
	Lines, Bytes int64
	// TotalBytes is what there is to read; 0: it is not known.
	TotalBytes int64
	// Done is whether this is the end.
	Done bool
}

// Report is what became of the lines.
//
//	Lines    = Unparsed.Count + Failed.Count + Unlimited + Decided
//	Decided  = Admitted + Refused
type Report struct {
	Format Format `json:"format"`
	// From and To are the earliest and the latest instant of a line.
	From time.Time `json:"from"`
	To   time.Time `json:"to"`
	// Lines are those that were read, without empty ones.
	Lines int64 `json:"lines"`
	// Decided are those that limits were asked for, of which some were Admitted and the others Refused.
	Decided  int64 `json:"decided"`
	Admitted int64 `json:"admitted"`
	Refused  int64 `json:"refused"`
	// Unlimited are lines that no tier fits: nothing limits such a request.
	Unlimited int64 `json:"unlimited"`
	// Buckets are the distinct buckets that were taken from.
	Buckets int `json:"buckets"`
	// OutOfOrder are lines whose instant is before that of a line above, and StepBack is the largest such step.
	OutOfOrder int64         `json:"out_of_order"`
	StepBack   time.Duration `json:"-"`
	// Limits are those that were asked, by their names.
	Limits []LimitReport `json:"limits"`
	// Keys are those that were refused most, the most refused first.
	Keys []KeyReport `json:"keys"`
	// Unparsed are lines that could not be read, and Failed those whose limits could not be asked, as they lack an attribute
	// or cost more than the limit can ever give.
	Unparsed Problems `json:"unparsed"`
	Failed   Problems `json:"failed"`
}

// LimitReport is what a limit has decided.
//
//	Asked = Admitted + Refused
type LimitReport struct {
	Limit string `json:"limit"`
	// Asked are the lines that the limit was asked for. It had enough for those Admitted, of which another limit may have
	// refused some: nothing was taken then.
	Asked    int64 `json:"asked"`
	Admitted int64 `json:"admitted"`
	Refused  int64 `json:"refused"`
	// Shadow is how many of the Refused went through all the same, as the limit was on trial.
	Shadow int64 `json:"shadow"`
	// Share is Refused of Asked, from 0 to 1.
	Share float64 `json:"share"`
	// FirstRefusal and LastRefusal are the zero time where nothing was refused.
	FirstRefusal time.Time `json:"first_refusal,omitzero"`
	LastRefusal  time.Time `json:"last_refusal,omitzero"`
	// Peak is the second in which the limit was asked most.
	Peak Peak `json:"peak"`
}

// Peak is a second of the log.
type Peak struct {
	At      time.Time `json:"at"`
	Asked   int64     `json:"asked"`
	Refused int64     `json:"refused"`
}

// KeyReport is a key that was refused.
type KeyReport struct {
	Limit        string    `json:"limit"`
	Key          string    `json:"key"` // as stored; empty: the bucket that everybody shares
	Refused      int64     `json:"refused"`
	FirstRefusal time.Time `json:"first_refusal"`
	LastRefusal  time.Time `json:"last_refusal"`
}

// Problems are lines with which something is wrong: how many, and the first of them.
type Problems struct {
	Count int64     `json:"count"`
	First []Problem `json:"first"`
}

// Problem is what is wrong with a line. It holds no text of the line.
type Problem struct {
	Source string `json:"source"`
	Line   int64  `json:"line"`
	Reason string `json:"reason"`
}

// Run replays the sources, one after the other as one log. Lines with which something is wrong are counted in the Report
// and left out. It returns an error that wraps ErrInvalidConfig or ErrUnreadable, that of a source which cannot be opened or
// read, that of Config.Refused, or that of ctx, with the Report as far as it got.
func Run(ctx context.Context, config Config, sources ...Source) (*Report, error) {
	return nil, errors.New("simulate: not yet")
}
