package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestScale(t *testing.T) {
	t.Parallel()

	for name, s := range map[string]scale{"Demo": demoScale(), "Test": short()} {
		t.Run(name+"LeavesRoomForLateWork", func(t *testing.T) {
			t.Parallel()
			late := s.share*float64(s.minute+s.slack())/float64(s.minute) + float64(largestRequest)/upstreamTokens
			require.InDelta(t, 1, late, 1e-6)
			require.Greater(t, s.slack(), 500*time.Millisecond)
			require.Less(t, s.staleAfter(), s.slack())
		})

		t.Run(name+"AsksForNoMoreThanTheLargestRequest", func(t *testing.T) {
			t.Parallel()
			prompts, _ := script(s)
			for i, u := range users() {
				for _, q := range prompts[i] {
					require.LessOrEqual(t, q.estimate(), u.most+1)
					require.LessOrEqual(t, countTokens(q.text)+q.maxTokens, largestRequest)
				}
			}
		})
	}
}

func TestScript(t *testing.T) {
	t.Parallel()

	t.Run("IsTheSameEveryTime", func(t *testing.T) {
		t.Parallel()
		one, _ := script(demoScale())
		other, _ := script(demoScale())
		require.Equal(t, one, other)
	})

	t.Run("IsEstimatedAboutRight", func(t *testing.T) {
		t.Parallel()
		prompts, _ := script(demoScale())
		estimated, used, above, below := 0, 0, 0, 0
		for _, ofUser := range prompts {
			for _, q := range ofUser {
				cost := countTokens(q.text) + answerTokens(completionRequest{Prompt: q.text, MaxTokens: q.maxTokens})
				estimated, used = estimated+q.estimate(), used+cost
				if cost > q.estimate() {
					above++
				} else if cost < q.estimate() {
					below++
				}
			}
		}
		require.InEpsilon(t, estimated, used, 0.02)
		require.Greater(t, above, 20) // there is something to charge
		require.Greater(t, below, 20) // and something to give back
	})
}
