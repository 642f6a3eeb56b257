package ratelimit

import "encoding/json"

// valueJSON is what projecting a Value takes, and nothing else.
type valueJSON struct {
	Limit     string  `json:"limit"`
	Algorithm string  `json:"algorithm"`
	Rate      float64 `json:"rate"`
	Period    int64   `json:"period_us"`
	Capacity  float64 `json:"capacity"`
	Start     int64   `json:"start_us,omitempty"`
	Value     float64 `json:"value"`
	TS        int64   `json:"ts_us"`
	Now       int64   `json:"now_us"`
}

// MarshalJSON returns the bucket as a client needs it to project it with the same answers to the last bit,
// which the JavaScript module of package httplimit/client does. No key is in it. The zero Value is null. Of a limit
// with Shards it holds the sum of the rows, and a projection of that is right only while the rows are level.
//
//	limit                     the limit's name
//	algorithm                 "token bucket" or "fixed window"
//	rate, period_us           rate tokens arrive each period, continuously or when a window begins
//	capacity                  the most it holds
//	start_us                  0 <= start_us < period_us: a window begins there (fixed window; absent is 0)
//	value, ts_us              value tokens were held at ts_us, negative while reservations are owed
//	now_us                    AsOf
//
// Spans and instants are whole microseconds, instants since 1970. A client whose numbers are float64 has
// them exactly until the year 2255, when they reach 2^53; that is why start_us is the first window since
// 1970, and not the far earlier one that the statements count from.
func (v Value) MarshalJSON() ([]byte, error) {
	if v.Limit.policy == nil {
		return []byte("null"), nil
	}
	t := v.terms
	out := valueJSON{
		Limit:     v.Limit.name,
		Algorithm: "token bucket",
		Rate:      t.Rate,
		Period:    t.Step * int64(t.Steps),
		Capacity:  t.Capacity,
		Value:     v.state.Value,
		TS:        v.state.TS,
		Now:       v.AsOf.UnixMicro(),
	}
	if t.Step > 1 { // windows of a microsecond are a token bucket
		out.Algorithm = "fixed window"
		out.Start = (t.Phase%t.Step + t.Step) % t.Step
	}
	return json.Marshal(out)
}
