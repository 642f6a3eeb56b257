package main

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// completionRequest and completionReply are what goes over the wire to the model and back.
type (
	completionRequest struct {
		Prompt    string `json:"prompt"`
		MaxTokens int    `json:"maxTokens"`
	}
	completionReply struct {
		Answer       string `json:"answer"`
		PromptTokens int    `json:"promptTokens"`
		AnswerTokens int    `json:"answerTokens"`
	}
)

// upstream is a model API that is stricter than most: it keeps an exact log, and refuses what would make any
// minute, wherever it begins, hold more than its requests or its tokens. It shares nothing with the
// limiter, neither code nor clock nor database.
//
// A request counts from its arrival: with the tokens of its prompt and all it may answer until it is
// answered, and with what it really used from then on.
type upstream struct {
	minute time.Duration

	mu       sync.Mutex
	accepted []*call              // in the order of arrival
	recent   int                  // the index of the first that arrived within the last minute
	arrived  map[string]time.Time // when each request arrived first, whether accepted or not, by its ID
	refused  int
	busy     time.Time // until then it asks to be left alone
	turned   int       // how many it turned away until then
	fullest  int       // the most tokens that a minute held
}

// call is a request that was accepted.
type call struct {
	id     string
	at     time.Time
	ended  time.Time // when it was answered
	tokens int
}

// ServeHTTP answers POST with a completionRequest. The header X-Request-Id names the request.
func (u *upstream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var request completionRequest
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&request); err != nil || r.Method != http.MethodPost {
		http.Error(w, "POST a prompt and maxTokens as JSON", http.StatusBadRequest)
		return
	}
	if wait := u.turnAway(time.Now()); wait > 0 {
		w.Header().Set("Retry-After", strconv.FormatInt(int64((wait+time.Second-1)/time.Second), 10))
		http.Error(w, "overloaded", http.StatusTooManyRequests)
		return
	}
	reply := completionReply{PromptTokens: countTokens(request.Prompt)}
	accepted, retryAfter := u.admit(r.Header.Get("X-Request-Id"), reply.PromptTokens+request.MaxTokens, time.Now())
	if accepted == nil {
		w.Header().Set("Retry-After-Ms", strconv.FormatInt(retryAfter.Milliseconds()+1, 10))
		http.Error(w, "rate limit exceeded", http.StatusTooManyRequests)
		return
	}
	reply.AnswerTokens = answerTokens(request)
	reply.Answer = fmt.Sprintf("An answer of %d tokens.", reply.AnswerTokens)
	time.Sleep(time.Duration(reply.AnswerTokens) * u.minute / 50_000) // it takes its time to think
	u.settle(accepted, reply.PromptTokens+reply.AnswerTokens, time.Now())
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(reply) // a caller who hung up has used the tokens all the same
}

// admit counts a request that may cost tokens, or returns nil and how long until it would be accepted.
func (u *upstream) admit(id string, tokens int, now time.Time) (*call, time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.arrived == nil {
		u.arrived = map[string]time.Time{}
	}
	if _, again := u.arrived[id]; !again {
		u.arrived[id] = now
	}
	for u.recent < len(u.accepted) && now.Sub(u.accepted[u.recent].at) >= u.minute {
		u.recent++
	}
	lastMinute := u.accepted[u.recent:]
	requests, held := len(lastMinute), 0
	for _, c := range lastMinute {
		held += c.tokens
	}
	fits := func() bool { return requests < upstreamRequests && held+tokens <= upstreamTokens }
	if fits() {
		c := &call{id: id, at: now, tokens: tokens}
		u.accepted = append(u.accepted, c)
		u.fullest = max(u.fullest, held+tokens)
		return c, 0
	}
	u.refused++
	for _, c := range lastMinute {
		requests, held = requests-1, held-c.tokens
		if fits() {
			return nil, c.at.Add(u.minute).Sub(now)
		}
	}
	return nil, u.minute // more than a whole minute has
}

// overload has the upstream ask to be left alone for a while.
func (u *upstream) overload(span time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.busy = time.Now().Add(span)
}

// turnAway returns how long the upstream asks to be left alone.
func (u *upstream) turnAway(now time.Time) time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	wait := u.busy.Sub(now)
	if wait > 0 {
		u.turned++
	}
	return wait
}

// turnedAway returns how many requests came while the upstream asked to be left alone.
func (u *upstream) turnedAway() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.turned
}

// settle corrects what a request counts for when it is answered.
func (u *upstream) settle(c *call, tokens int, now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	c.tokens, c.ended = tokens, now
}

// meter returns what was accepted so far, in the order of arrival, how many requests were refused, and the
// most tokens that a minute held.
func (u *upstream) meter() (accepted []call, refused, fullest int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, c := range u.accepted {
		accepted = append(accepted, *c)
	}
	return accepted, u.refused, u.fullest
}

// arrival returns when the request arrived first.
func (u *upstream) arrival(id string) time.Time {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.arrived[id]
}

// countTokens is the model's tokenizer: a token is up to four letters of a word. The backend does not know
// it and estimates.
func countTokens(text string) (n int) {
	for word := range strings.FieldsSeq(text) {
		n += (len(word) + 3) / 4
	}
	return n
}

// answerTokens is how long the model's answer turns out: 92 to 100 % of what it may be.
func answerTokens(r completionRequest) int {
	const least, steps = 92, 9
	percent := least + int(crc32.ChecksumIEEE([]byte(r.Prompt))%steps)
	return (r.MaxTokens*percent + 99) / 100
}
