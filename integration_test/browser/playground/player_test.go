package playground_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

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
