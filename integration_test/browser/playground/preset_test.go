package playground_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSixtyRequestsASecond steps through the first example with the keyboard, and reads the decisions from the page. In the first
// second 59 requests are admitted, the first refusal is at 0.983 s, and then one in six is admitted.
func TestSixtyRequestsASecond(t *testing.T) {
	t.Parallel()
	p := open(t, serve(t))
	require.Equal(t, "true", play[string](t, p, `return String(document.getElementById('preset-sixty').checked);`))
	p.press(t, strings.Repeat(".", 58))
	require.Equal(t, "0.967 s", p.text(t, "time"))
	require.Contains(t, p.text(t, "lane-token"), "Admitted 59 Refused 0")
	require.Contains(t, p.text(t, "lane-token"), "First refusal none yet")
	p.press(t, ".")
	require.Equal(t, "0.983 s", p.text(t, "time"))
	require.Contains(t, p.text(t, "lane-token"), "Refused at 0.983 s, come back in 0.017 s")
	require.Contains(t, p.text(t, "lane-token"), "Admitted 59 Refused 1 First 1 s 59 of 60 First refusal 0.983 s")

	admitted := 59
	shown := play[[]string](t, p, `
		const shown = [];
		for (let i = 0; i < 120; i++) {
			document.body.dispatchEvent(new KeyboardEvent('keydown', { key: '.', bubbles: true }));
			shown.push(document.getElementById('lane-token').innerText.replace(/\s+/g, ' '));
		}
		return shown;`)
	for i, text := range shown {
		if i%6 == 0 {
			admitted++
		}
		require.Contains(t, text, fmt.Sprintf("Admitted %d Refused %d ", admitted, 61+i-admitted), "request %d", 60+i)
	}
	p.press(t, ".")
	require.Equal(t, "3 s", p.text(t, "time"))
	require.Contains(t, p.text(t, "lane-token"), "First 1 s 59 of 60 First refusal 0.983 s Last 1 s 10 of 60, 1 in 6")
}

// TestStoriesAreTrue reads from the page, at the instants that each preset names, the figures that its story tells.
func TestStoriesAreTrue(t *testing.T) {
	t.Parallel()
	p := open(t, serve(t))
	type preset struct {
		ID    string  `json:"id"`
		Story string  `json:"story"`
		Shows [][]any `json:"shows"`
	}
	presets := play[[]preset](t, p, `
		const { PRESETS } = await import('./presets.js');
		return PRESETS.map(({ id, story, shows }) => ({ id, story, shows }));`)
	for _, preset := range presets {
		t.Run(preset.ID, func(t *testing.T) {
			require.Equal(t, 2, strings.Count(preset.Story+" ", ". "), "sentences of %q", preset.Story)
			require.NotEmpty(t, preset.Shows)
			for _, show := range preset.Shows {
				lane, text, told := show[0].(string), show[2].(string), show[3].(string)
				p.follow(t, "#preset="+preset.ID+"&at="+strconv.FormatFloat(show[1].(float64), 'f', -1, 64))
				require.Contains(t, p.text(t, "lane-"+lane), text)
				require.Contains(t, p.text(t, "story"), told)
			}
		})
	}
}
