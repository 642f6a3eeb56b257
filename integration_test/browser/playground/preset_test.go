package playground_test

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin/playground"
	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
)

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

// TestPlayer lets simulated time run on a clock of the test's own.
func TestPlayer(t *testing.T) {
	t.Parallel()
	p := open(t, serve(t))
	require.Equal(t, []string{
		"loaded 0 stopped",
		"running 250000 asked 1", "slower 350000 asked 1", "faster 360000 asked 1",
		"stopped 360000 asked 1", "nothing happens 360000 asked 0",
		"twice 1360000 asked 1",
		"forward 2000000 stopped", "forward 3000000 stopped", "forward 3000000 stopped",
		"back 2000000 stopped", "back 0 stopped", "back 0 stopped",
		"beyond 3000000 stopped", "before 0 stopped",
		"a page that nobody saw 2005000", "to the end 3000000 stopped asked 0",
		"again 0 running", "again 500000",
		"another that goes on 1000000 running", "another 1000000 stopped",
		"speed 60", "speed 0.1",
	}, play[[]string](t, p, `
		const { createPlayer } = await import('./player.js');
		let ms = 0, frames = [], changes = 0;
		const player = createPlayer({ now: () => ms, frame: (run) => frames.push(run), changed: () => changes++ });
		const seen = [];
		const note = (text, ...more) => seen.push([text, player.at, ...more].join(' '));
		const state = () => (player.running ? 'running' : 'stopped');
		const pass = (by) => {
			ms += by;
			const due = frames;
			frames = [];
			for (const run of due) run();
		};
		const asked = () => 'asked ' + frames.length;

		player.load({ span: 3e6, instants: [0, 2e6, 3e6] }, 0);
		note('loaded', state());
		player.setSpeed(0.25);
		player.toggle();
		pass(1000); note('running', asked());
		player.setSpeed(0.1);
		pass(1000); note('slower', asked());
		player.setSpeed(10);
		pass(1); note('faster', asked());
		player.toggle(); note('stopped', asked());
		pass(1000); note('nothing happens', asked());
		player.setSpeed(1);
		player.toggle(); player.toggle(); player.toggle(); // of what was asked for before, nothing runs
		pass(1000); note('twice', asked());
		for (const move of ['forward', 'forward', 'forward', 'back', 'back', 'back']) { player[move](); note(move, state()); }
		player.seek(9e9); note('beyond', state());
		player.seek(-1); note('before', state());
		pass(5);
		player.seek(1e6 + 5000);
		player.toggle();
		pass(3_600_000); note('a page that nobody saw');
		pass(1000); note('to the end', state(), asked());
		player.toggle(); note('again', state());
		pass(500); note('again');
		player.load({ span: 2e6, instants: [0, 2e6] }, 1e6, true); note('another that goes on', state());
		player.load({ span: 2e6, instants: [0, 2e6] }, 1e6); note('another', state());
		for (const speed of [1000, 0]) { player.setSpeed(speed); seen.push('speed ' + player.speed); }
		return seen;`))
}

// TestTheFileWorksByItself opens the page as one file, from a disk and from a server that has nothing else.
func TestTheFileWorksByItself(t *testing.T) {
	t.Parallel()
	var text bytes.Buffer
	require.NoError(t, playground.WriteHTML(&text))
	path := filepath.Join(t.TempDir(), "index.html")
	require.NoError(t, os.WriteFile(path, text.Bytes(), 0o600))
	mux := http.NewServeMux()
	mux.HandleFunc("/docs/{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write(text.Bytes())
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	p := open(t, "file://"+path)
	for _, url := range []string{"file://" + path, server.URL + "/docs/"} {
		before := len(p.watch.Requests())
		p.goTo(t, url)
		require.Contains(t, p.text(t, "lane-token"), "Admitted 1 Refused 0")
		p.goTo(t, url+"#preset=model&at=60")
		require.Equal(t, "60 s", p.text(t, "time"))
		p.press(t, ".")
		require.Equal(t, "60.11 s", p.text(t, "time"))
		p.press(t, "d")
		require.Empty(t, browsertest.Axe(t, p.tab))
		require.Contains(t, play[string](t, p, `return location.href;`), url+"#preset=model&at=60.1")
		for _, asked := range p.watch.Requests()[before:] {
			require.Contains(t, []string{url, "about:blank", "data:,"}, asked)
		}
	}
}
