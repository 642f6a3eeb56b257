package scenario_test

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What the model allows in any minute, and the most tokens of a question.
const (
	modelRequests = 200
	modelTokens   = 200_000
	maxQuestion   = 5_000
)

// model is a model API that is stricter than most: it keeps an exact log, and refuses a request that would make any minute hold
// more than its requests or its tokens. A request counts from its arrival: with all tokens that it may use until it is answered,
// and with the used tokens from then on.
type model struct {
	minute time.Duration // time runs faster here

	mu         sync.Mutex
	accepted   []*call              // in the order of arrival
	recent     int                  // the index of the first that arrived within the last minute
	arrived    map[string]time.Time // when each request arrived first, accepted or not
	refused    int
	busy       time.Time // until then the model asks to be left alone
	turnedAway int       // requests until then
	fullest    int       // the most tokens that a minute held
}

// call is a request that was accepted.
type call struct {
	id        string
	at, ended time.Time
	tokens    int
}

type completion struct {
	Prompt    string `json:"prompt"`
	MaxTokens int    `json:"max_tokens"`
}

// ServeHTTP answers a completion. The header X-Request-Id names it.
func (m *model) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var question completion
	if err := json.NewDecoder(r.Body).Decode(&question); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if wait := m.turnAway(time.Now()); wait > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int((wait+time.Second-1)/time.Second)))
		http.Error(w, "overloaded", http.StatusTooManyRequests)
		return
	}
	prompt, answer := countTokens(question.Prompt), answerTokens(question)
	accepted := m.admit(r.Header.Get("X-Request-Id"), prompt+question.MaxTokens, time.Now())
	if accepted == nil {
		http.Error(w, "rate limit exceeded", http.StatusTooManyRequests)
		return
	}
	time.Sleep(time.Duration(answer) * m.minute / 50_000) // it thinks
	m.settle(accepted, prompt+answer, time.Now())
	_ = json.NewEncoder(w).Encode(map[string]any{"answer": fmt.Sprintf("An answer of %d tokens.", answer), "tokens": prompt + answer})
}

// admit counts a request that may use so many tokens, or returns nil.
func (m *model) admit(id string, tokens int, now time.Time) *call {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.arrived == nil {
		m.arrived = map[string]time.Time{}
	}
	if _, again := m.arrived[id]; !again {
		m.arrived[id] = now
	}
	for m.recent < len(m.accepted) && now.Sub(m.accepted[m.recent].at) >= m.minute {
		m.recent++
	}
	held := tokens
	for _, c := range m.accepted[m.recent:] {
		held += c.tokens
	}
	if len(m.accepted)-m.recent >= modelRequests || held > modelTokens {
		m.refused++
		return nil
	}
	c := &call{id: id, at: now, tokens: tokens}
	m.accepted = append(m.accepted, c)
	m.fullest = max(m.fullest, held)
	return c
}

// settle corrects the tokens of a request when it is answered.
func (m *model) settle(c *call, tokens int, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	c.tokens, c.ended = tokens, now
}

// overload makes the model ask to be left alone for a while.
func (m *model) overload(span time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.busy = time.Now().Add(span)
}

func (m *model) turnAway(now time.Time) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	wait := m.busy.Sub(now)
	if wait > 0 {
		m.turnedAway++
	}
	return wait
}

// calls returns the accepted requests in the order of arrival.
func (m *model) calls() (accepted []call) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.accepted {
		accepted = append(accepted, *c)
	}
	return accepted
}

// countTokens is the model's tokenizer, which the program does not know: a token is up to four letters of a word.
func countTokens(text string) (n int) {
	for word := range strings.FieldsSeq(text) {
		n += (len(word) + 3) / 4
	}
	return n
}

// answerTokens returns the length of an answer: 92 to 100 % of the longest one.
func answerTokens(question completion) int {
	percent := 92 + int(crc32.ChecksumIEEE([]byte(question.Prompt))%9)
	return (question.MaxTokens*percent + 99) / 100
}

// TestModel promises that the model refuses a request beyond its tokens, or beyond its requests, of any minute.
func TestModel(t *testing.T) {
	t.Parallel()
	start := time.Now()
	m := &model{minute: time.Minute}
	for _, step := range []struct {
		at       time.Duration
		tokens   int
		accepted bool
	}{
		{0, modelTokens / 2, true},
		{30 * time.Second, modelTokens / 2, true},
		{30 * time.Second, 1, false},
		{60*time.Second - 1, 1, false},
		{60 * time.Second, modelTokens / 2, true}, // the first has left the minute
		{60 * time.Second, 1, false},
	} {
		require.Equal(t, step.accepted, m.admit("a", step.tokens, start.Add(step.at)) != nil, step)
	}
	m = &model{minute: time.Minute}
	m.settle(m.admit("a", modelTokens, start), 0, start) // the answer used none
	for range modelRequests - 1 {
		require.NotNil(t, m.admit("a", 1, start))
	}
	require.Nil(t, m.admit("a", 1, start.Add(time.Minute-1)))
	require.NotNil(t, m.admit("a", 1, start.Add(time.Minute)))
}
