package scenario_test

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// The limits of the model in any minute, and the most tokens of a question.
const (
	modelRequests = 200
	modelTokens   = 200_000
	maxQuestion   = 5_000
)

// model is a model API that is stricter than most: it keeps an exact log, and refuses a request if any minute would hold more than
// modelRequests or modelTokens. A request counts all tokens of its longest answer until it is answered, and then the used tokens.
type model struct {
	minute time.Duration // shorter than a minute

	mu         sync.Mutex
	accepted   []*call              // in the order of arrival
	arrived    map[string]time.Time // the first arrival of each request, accepted or refused
	refused    int
	busy       time.Time      // until then the model answers 429 with Retry-After
	turnedAway int            // requests that were answered so
	current    map[string]int // requests in progress by user
	most       map[string]int // the maxima of current
}

// call is an accepted request.
type call struct {
	id     string
	at     time.Time
	tokens int
}

// completion is a question. The first word of its prompt is the user.
type completion struct {
	Prompt    string `json:"prompt"`
	MaxTokens int    `json:"max_tokens"`
}

// used returns the tokens of the prompt and of its answer, which has 95 % of the longest length.
func (q completion) used() int { return countTokens(q.Prompt) + (q.MaxTokens*95+99)/100 }

// countTokens is the model's tokenizer, which the program does not know: a token has up to four letters of a word.
func countTokens(text string) (n int) {
	for word := range strings.FieldsSeq(text) {
		n += (len(word) + 3) / 4
	}
	return n
}

// ServeHTTP answers a completion. The header X-Request-Id names it.
func (m *model) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var question completion
	if err := json.NewDecoder(r.Body).Decode(&question); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	user, _, _ := strings.Cut(question.Prompt, " ")
	accepted, wait := m.admit(r.Header.Get("X-Request-Id"), user, countTokens(question.Prompt)+question.MaxTokens, time.Now())
	if accepted == nil {
		if wait > 0 {
			w.Header().Set("Retry-After", strconv.Itoa(int((wait+time.Second-1)/time.Second)))
		}
		http.Error(w, "rate limit exceeded", http.StatusTooManyRequests)
		return
	}
	time.Sleep(time.Duration(question.MaxTokens) * m.minute / 50_000) // the time to answer
	m.mu.Lock()
	accepted.tokens = question.used()
	m.current[user]--
	m.mu.Unlock()
	_ = json.NewEncoder(w).Encode(map[string]any{"answer": "It depends.", "tokens": question.used()})
}

// admit counts a request that may use so many tokens. It returns nil for a refusal, with the wait if the model is busy.
func (m *model) admit(id, user string, tokens int, now time.Time) (c *call, wait time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if wait := m.busy.Sub(now); wait > 0 {
		m.turnedAway++
		return nil, wait
	}
	if _, again := m.arrived[id]; !again {
		m.arrived[id] = now
	}
	requests, held := 1, tokens
	for _, c := range m.accepted {
		if now.Sub(c.at) < m.minute {
			requests, held = requests+1, held+c.tokens
		}
	}
	if requests > modelRequests || held > modelTokens {
		m.refused++
		return nil, 0
	}
	c = &call{id: id, at: now, tokens: tokens}
	m.accepted = append(m.accepted, c)
	m.current[user]++
	m.most[user] = max(m.most[user], m.current[user])
	return c, 0
}
