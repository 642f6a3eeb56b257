package simulate

import "time"

// maxProblems is the number of problems of a kind in a report.
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
	// Cost is the cost of the line.
	Cost float64 `json:"cost"`
	// RetryAfterUs is the time after which the limit would allow the line, in microseconds.
	RetryAfterUs int64 `json:"retry_after_us"`
	// Shadow reports whether the limit is in shadow, so that the request is not refused.
	Shadow bool `json:"shadow"`
	// Source and Line are the place of the line, from 1 on.
	Source string `json:"source"`
	Line   int64  `json:"line"`
}

// Report has the results of a replay.
//
//	Lines    = Unparsed.Count + Failed.Count + Unlimited + Decided
//	Decided  = Admitted + Refused
type Report struct {
	// From and To are the earliest and the latest instant of a line.
	From time.Time `json:"from"`
	To   time.Time `json:"to"`
	// Lines is the number of lines, without empty lines.
	Lines int64 `json:"lines"`
	// Decided is the number of lines with a decision: Admitted or Refused.
	Decided  int64 `json:"decided"`
	Admitted int64 `json:"admitted"`
	Refused  int64 `json:"refused"`
	// Unlimited is the number of lines that no tier fits, so that no limit applies.
	Unlimited int64 `json:"unlimited"`
	// Buckets is the number of buckets with taken tokens.
	Buckets int `json:"buckets"`
	// WithoutPlan is the number of decided lines without a plan, and UnknownPlan of those with a plan that no rule has,
	// if the rules have plans.
	WithoutPlan int64 `json:"without_plan"`
	UnknownPlan int64 `json:"unknown_plan"`
	// OutOfOrder is the number of lines that are earlier than a line above them in their source, and StepBackUs the
	// largest such step in microseconds. The lines were decided in the order of time.
	OutOfOrder int64 `json:"out_of_order"`
	StepBackUs int64 `json:"step_back_us"`
	// Limits are the limits that decided, sorted by name.
	Limits []LimitReport `json:"limits"`
	// Keys are the keys with the most refusals, in descending order.
	Keys []KeyReport `json:"keys"`
	// Unparsed are lines that could not be read. Failed are lines without a decision: they lack an attribute, or cost
	// more than the limit can ever give.
	Unparsed Problems `json:"unparsed"`
	Failed   Problems `json:"failed"`
}

// LimitReport has the decisions of a limit.
//
//	Asked = Admitted + Refused
type LimitReport struct {
	// Limit is the limit's name.
	Limit string `json:"limit"`
	// Asked is the number of lines that the limit decided. It had enough tokens for the Admitted lines. If another
	// limit refused one of these, nothing was taken.
	Asked    int64 `json:"asked"`
	Admitted int64 `json:"admitted"`
	Refused  int64 `json:"refused"`
	// Shadow is the number of Refused lines that were admitted, because the limit was in shadow.
	Shadow int64 `json:"shadow"`
	// Share is Refused of Asked, from 0 to 1.
	Share float64 `json:"share"`
	// FirstRefusal and LastRefusal are the earliest and the latest refusal, and the zero time without refusals.
	FirstRefusal time.Time `json:"first_refusal,omitzero"`
	LastRefusal  time.Time `json:"last_refusal,omitzero"`
	// Peak is the second with the most lines.
	Peak Peak `json:"peak"`
}

// Peak is a second of the log.
type Peak struct {
	At      time.Time `json:"at,omitzero"`
	Asked   int64     `json:"asked"`
	Refused int64     `json:"refused"`
}

// KeyReport is a refused key.
type KeyReport struct {
	// Limit and Key are the bucket, as in Refusal.
	Limit string `json:"limit"`
	Key   string `json:"key"`
	// Refused is the number of refusals, from FirstRefusal to LastRefusal. Shadow of them refused no request.
	Refused      int64     `json:"refused"`
	Shadow       int64     `json:"shadow"`
	FirstRefusal time.Time `json:"first_refusal"`
	LastRefusal  time.Time `json:"last_refusal"`
}

// Problems are lines with an error: their number, and the first 5 of them.
type Problems struct {
	Count int64     `json:"count"`
	First []Problem `json:"first"`
}

// Problem is the error of a line. It contains no text of the line.
type Problem struct {
	// Source and Line are the place of the line, from 1 on.
	Source string `json:"source"`
	Line   int64  `json:"line"`
	// Reason is the error.
	Reason string `json:"reason"`
}

func (p *Problems) add(source string, line int64, err error) {
	p.Count++
	if len(p.First) < maxProblems {
		p.First = append(p.First, Problem{source, line, err.Error()})
	}
}
