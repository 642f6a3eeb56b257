package main

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// user is somebody who asks, and how: so many prompts, of tokens from least to most by the backend's
// estimate, of which an eighth is left for the answer.
type user struct {
	name, plan  string
	prompts     int
	least, most int
	words       []string
	bursts      int // asks in so many bursts; 0: all the time
}

// large is the size from which a request counts as large in the report: only the librarian's are.
const large = 4_000

func users() []user {
	prose := strings.Fields("what does this text mean when you read it with care and tell the story of every separate question again between chapters of a long history")
	code := strings.Fields("func main type case else map nil for var int error struct return string range switch package append continue interface const import chan select")
	return []user{
		{name: "librarian", plan: "pro", prompts: 24, least: large + 200, most: largestRequest - 100, words: prose},
		{name: "programmer", plan: "pro", prompts: 50, least: 1_500, most: 2_500, words: code},
		{name: "writer", plan: "pro", prompts: 70, least: 800, most: 1_600, words: prose},
		{name: "student", plan: "free", prompts: 70, least: 300, most: 1_500, words: prose},
		{name: "chatter", plan: "free", prompts: 80, least: 40, most: 400, words: prose},
		{name: "hasty", plan: "free", prompts: 40, least: 400, most: 1_600, words: prose, bursts: 3},
	}
}

// prompt is a question, and when it is asked.
type prompt struct {
	at        time.Duration
	text      string
	maxTokens int
}

func (p prompt) estimate() int { return estimate(p.text, p.maxTokens) }

// opening is how many prompts each user asks at once when the run begins, so that there is a queue.
const opening = 4

// script returns what each user asks: the same in every run. Together they ask for the tokens of a span in the
// first three fifths of it, so that there is always a queue.
func script(s scale) (byUser [][]prompt, span time.Duration) {
	random := rand.New(rand.NewPCG(1, 2))
	total := 0
	for _, u := range users() {
		prompts := make([]prompt, int(float64(u.prompts)*s.prompts))
		for i := range prompts {
			size := u.least + random.IntN(u.most-u.least+1)
			prompts[i].maxTokens = size / 8
			prompts[i].text = text(random, u.words, 4*(size-size/8))
			total += prompts[i].estimate()
		}
		byUser = append(byUser, prompts)
	}
	span = time.Duration(float64(s.minute) * float64(total) / (s.share * upstreamTokens))
	for u, prompts := range byUser {
		users()[u].schedule(random, prompts, span*3/5)
	}
	return byUser, span
}

// schedule says when u asks each of prompts.
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

// text returns so many bytes of words, at most.
func text(random *rand.Rand, words []string, size int) string {
	var b strings.Builder
	for {
		word := words[random.IntN(len(words))]
		if b.Len()+len(word)+1 > size {
			return b.String()
		}
		b.WriteString(word)
		b.WriteByte(' ')
	}
}
