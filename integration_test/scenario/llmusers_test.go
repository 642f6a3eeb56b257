package scenario_test

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// user asks prompts of least to most tokens, by the program's estimate, of which an eighth is left for the answer.
type user struct {
	name, plan  string
	prompts     int
	least, most int
	words       []string
	bursts      int // asks in so many bursts; 0: all the time
}

// slots is how many questions of a user the model may have at a time.
func (u user) slots() int { return map[string]int{"free": 2, "pro": 4}[u.plan] }

// large is the size from which the report counts a request as large: only the librarian's are.
const large = 4_000

func users() []user {
	prose := strings.Fields("what does this text mean when you read it with care and tell the story of every separate question again between chapters of a long history")
	code := strings.Fields("func main type case else map nil for var int error struct return string range switch package append continue interface const import chan select")
	return []user{
		{name: "librarian", plan: "pro", prompts: 24, least: large + 200, most: maxQuestion - 100, words: prose},
		{name: "programmer", plan: "pro", prompts: 50, least: 1_500, most: 2_500, words: code},
		{name: "writer", plan: "pro", prompts: 70, least: 800, most: 1_600, words: prose},
		{name: "student", plan: "free", prompts: 70, least: 300, most: 1_500, words: prose},
		{name: "chatter", plan: "free", prompts: 80, least: 40, most: 400, words: prose},
		{name: "hasty", plan: "free", prompts: 40, least: 400, most: 1_600, words: prose, bursts: 3},
	}
}

// prompt is a question and its time.
type prompt struct {
	at time.Duration
	completion
}

func (p prompt) estimate() int { return (len(p.Prompt)+3)/4 + p.MaxTokens }

// scale is how fast a run goes, and how much of the model it uses.
type scale struct {
	minute  time.Duration // of the model
	share   float64       // of what the model allows, that the program uses
	prompts float64       // the number of the prompts
}

// shortScale is most of a run at ten times its speed.
func shortScale() scale { return scale{minute: 6 * time.Second, share: 0.85, prompts: 0.75} }

// fullScale is the run of the program's default share, with a minute of 18 seconds.
func fullScale() scale { return scale{minute: 18 * time.Second, share: 0.94, prompts: 1} }

// slack is how late work may reach the model and still never be too much for it.
func (s scale) slack() time.Duration {
	return time.Duration(float64(s.minute) * ((1-float64(maxQuestion)/modelTokens)/s.share - 1))
}

// staleAfter is how late work may start, and way the time that is left from there to the model.
func (s scale) staleAfter() time.Duration { return s.slack() * 3 / 4 }
func (s scale) way() time.Duration        { return s.slack() - s.staleAfter() }

// opening is how many prompts each user asks at once when the run begins, to build a queue.
const opening = 4

// script returns what each user asks: the same in every run. Together they ask for the tokens of a span in the first three fifths
// of it, to keep a queue.
func script(s scale) (byUser [][]prompt, span time.Duration) {
	random := rand.New(rand.NewPCG(1, 2))
	total := 0
	for _, u := range users() {
		prompts := make([]prompt, int(float64(u.prompts)*s.prompts))
		for i := range prompts {
			size := u.least + random.IntN(u.most-u.least+1)
			prompts[i].MaxTokens = size / 8
			prompts[i].Prompt = text(random, u.words, 4*(size-size/8))
			total += prompts[i].estimate()
		}
		byUser = append(byUser, prompts)
	}
	span = time.Duration(float64(s.minute) * float64(total) / (s.share * modelTokens))
	for u, prompts := range byUser {
		users()[u].schedule(random, prompts, span*3/5)
	}
	return byUser, span
}

// schedule sets when u asks each of prompts.
func (u user) schedule(random *rand.Rand, prompts []prompt, span time.Duration) {
	for i := range prompts {
		switch {
		case u.bursts > 0:
			prompts[i].at = span * time.Duration(1+i%u.bursts) / time.Duration(1+u.bursts)
		case i >= opening:
			prompts[i].at = time.Duration(random.Int64N(int64(span)))
		}
	}
	slices.SortStableFunc(prompts, func(a, b prompt) int { return cmp.Compare(a.at, b.at) })
}

// text returns at most so many bytes of words.
func text(random *rand.Rand, words []string, size int) string {
	var b strings.Builder
	for {
		word := words[random.IntN(len(words))]
		if b.Len()+len(word)+1 > size {
			return b.String()
		}
		b.WriteString(word + " ")
	}
}

// TestScript promises that late work fits into the room that a scale leaves, and that questions are the same each time and settle
// both above and below their estimates.
func TestScript(t *testing.T) {
	t.Parallel()
	for _, s := range []scale{fullScale(), shortScale()} {
		held := s.share*float64(s.minute+s.slack())/float64(s.minute) + float64(maxQuestion)/modelTokens
		require.InDelta(t, 1, held, 1e-6, "a minute has no room for late work")
		prompts, _ := script(s)
		again, _ := script(s)
		require.Equal(t, prompts, again)
		above, below := 0, 0
		for i := range users() {
			for _, q := range prompts[i] {
				require.LessOrEqual(t, countTokens(q.Prompt)+q.MaxTokens, maxQuestion)
				if cost := countTokens(q.Prompt) + answerTokens(q.completion); cost > q.estimate() {
					above++
				} else if cost < q.estimate() {
					below++
				}
			}
		}
		require.Greater(t, above, 20) // there is something to charge
		require.Greater(t, below, 20) // and something to give back
	}
}
