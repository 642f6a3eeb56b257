package simulate

import "time"

// maxProblems is how many problems of a kind a report names.
const maxProblems = 5

// Refusal is a limit that refused a line.
type Refusal struct {
	// Time is the instant of the line.
	Time time.Time `json:"time"`
	// Limit and Key are the bucket. The key is as stored, and empty for the bucket that everybody shares.
	Limit string `json:"limit"`
	Key   string `json:"key"`
	// Rule is the name of the rule that decided.
	Rule string `json:"rule"`
	// Cost is what the line asked for.
	Cost float64 `json:"cost"`
	// RetryAfterUs is the wait after which the limit would allow it, in microseconds.
	RetryAfterUs int64 `json:"retry_after_us"`
	// Shadow is whether the limit is in shadow, so that nobody is turned away.
	Shadow bool `json:"shadow"`
	// Source and Line are where the line is, from 1 on.
	Source string `json:"source"`
	Line   int64  `json:"line"`
}

// Report is what became of the lines.
//
//	Lines    = Unparsed.Count + Failed.Count + Unlimited + Decided
//	Decided  = Admitted + Refused
type Report struct {
	// Format is how the lines are written.
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
	// Buckets is how many were taken from.
	Buckets int `json:"buckets"`
	// OutOfOrder are lines whose instant is before that of a line above, and StepBackUs is the largest such step in microseconds.
	OutOfOrder int64 `json:"out_of_order"`
	StepBackUs int64 `json:"step_back_us"`
	// Limits are those that were asked, sorted by their names.
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
	// Limit is the limit's name.
	Limit string `json:"limit"`
	// Asked are the lines that the limit was asked for. It had enough for those Admitted, of which another limit may have
	// refused some: nothing was taken then.
	Asked    int64 `json:"asked"`
	Admitted int64 `json:"admitted"`
	Refused  int64 `json:"refused"`
	// Shadow is how many of the Refused went through all the same, as the limit was in shadow.
	Shadow int64 `json:"shadow"`
	// Share is Refused of Asked, from 0 to 1.
	Share float64 `json:"share"`
	// FirstRefusal and LastRefusal are the earliest and the latest, and the zero time where nothing was refused.
	FirstRefusal time.Time `json:"first_refusal,omitzero"`
	LastRefusal  time.Time `json:"last_refusal,omitzero"`
	// Peak is the second in which the limit was asked most. A line that steps back by up to a minute counts for the second of
	// the lines above.
	Peak Peak `json:"peak"`
}

// Peak is a second of the log.
type Peak struct {
	At      time.Time `json:"at,omitzero"`
	Asked   int64     `json:"asked"`
	Refused int64     `json:"refused"`
}

// KeyReport is a key that was refused.
type KeyReport struct {
	// Limit and Key are the bucket, as of a Refusal.
	Limit string `json:"limit"`
	Key   string `json:"key"`
	// Refused is how often it refused, from FirstRefusal to LastRefusal.
	Refused      int64     `json:"refused"`
	FirstRefusal time.Time `json:"first_refusal"`
	LastRefusal  time.Time `json:"last_refusal"`
}

// Problems are lines with which something is wrong: how many, and the first 5 of them.
type Problems struct {
	Count int64     `json:"count"`
	First []Problem `json:"first"`
}

// Problem is what is wrong with a line. It holds no text of the line.
type Problem struct {
	// Source and Line are where the line is, from 1 on.
	Source string `json:"source"`
	Line   int64  `json:"line"`
	// Reason is what is wrong.
	Reason string `json:"reason"`
}

func (p *Problems) add(source string, line int64, err error) {
	p.Count++
	if len(p.First) < maxProblems {
		p.First = append(p.First, Problem{source, line, err.Error()})
	}
}
