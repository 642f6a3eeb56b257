package main

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestUpstream(t *testing.T) {
	t.Parallel()
	start := time.Now()

	t.Run("RefusesTokensBeyondTheLimitOfAnyMinute", func(t *testing.T) {
		t.Parallel()
		u := &upstream{minute: time.Minute}
		for _, step := range []struct {
			at         time.Duration
			tokens     int
			accepted   bool
			retryAfter time.Duration
		}{
			{at: 0, tokens: upstreamTokens / 2, accepted: true},
			{at: 30 * time.Second, tokens: upstreamTokens / 2, accepted: true},
			{at: 30 * time.Second, tokens: 1, retryAfter: 30 * time.Second},
			{at: 60*time.Second - 1, tokens: 1, retryAfter: 1},
			{at: 60 * time.Second, tokens: upstreamTokens / 2, accepted: true}, // the first has left the minute
			{at: 60 * time.Second, tokens: upstreamTokens, retryAfter: time.Minute},
			{at: 60 * time.Second, tokens: 1, retryAfter: 30 * time.Second},
		} {
			c, retryAfter := u.admit("a", step.tokens, start.Add(step.at))
			require.Equal(t, step.accepted, c != nil, step)
			require.Equal(t, step.retryAfter, retryAfter, step)
		}
		accepted, refused, fullest := u.meter()
		require.Len(t, accepted, 3)
		require.Equal(t, 4, refused)
		require.Equal(t, upstreamTokens, fullest)
	})

	t.Run("RefusesRequestsBeyondTheLimitOfAnyMinute", func(t *testing.T) {
		t.Parallel()
		u := &upstream{minute: time.Minute}
		for i := range upstreamRequests {
			c, _ := u.admit("a", 1, start.Add(time.Duration(i)*time.Millisecond))
			require.NotNil(t, c)
		}
		c, retryAfter := u.admit("a", 1, start.Add(time.Second))
		require.Nil(t, c)
		require.Equal(t, 59*time.Second, retryAfter)
	})

	t.Run("CountsWhatWasUsedOnceItIsAnswered", func(t *testing.T) {
		t.Parallel()
		u := &upstream{minute: time.Minute}
		c, _ := u.admit("a", upstreamTokens, start)
		require.NotNil(t, c)
		u.settle(c, upstreamTokens-10, start)
		c, _ = u.admit("b", 11, start)
		require.Nil(t, c)
		c, _ = u.admit("b", 10, start)
		require.NotNil(t, c)
	})

	t.Run("AnswersWithTheUsageAndThen429", func(t *testing.T) {
		t.Parallel()
		u := &upstream{minute: time.Minute}
		post := func(maxTokens int) *httptest.ResponseRecorder {
			body, err := json.Marshal(completionRequest{Prompt: strings.Repeat("word ", 100), MaxTokens: maxTokens})
			require.NoError(t, err)
			recorder := httptest.NewRecorder()
			u.ServeHTTP(recorder, httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(body)))
			return recorder
		}
		answer := post(10)
		require.Equal(t, http.StatusOK, answer.Code)
		var reply completionReply
		require.NoError(t, json.Unmarshal(answer.Body.Bytes(), &reply))
		require.Equal(t, 100, reply.PromptTokens)
		require.Equal(t, 10, reply.AnswerTokens)
		accepted, _, _ := u.meter()
		require.Equal(t, 110, accepted[0].tokens)

		answer = post(upstreamTokens)
		require.Equal(t, http.StatusTooManyRequests, answer.Code)
		require.Equal(t, "60001", answer.Header().Get("Retry-After-Ms"))
	})
}
