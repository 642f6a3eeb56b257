package playground_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
)

// TestThePlaygroundStartsByItself promises that the page runs at once, except with a link to an instant, or if the user
// prefers reduced motion.
func TestThePlaygroundStartsByItself(t *testing.T) {
	t.Parallel()
	url := serve(t)
	p := open(t, url)
	runs := func(address string) string {
		require.NoError(t, chromedp.Do(p.tab, chromedp.Navigate("about:blank"), chromedp.Navigate(address)))
		return p.text(t, "run")
	}
	require.Equal(t, "Pause", runs(url))
	require.Equal(t, "Play", runs(url+"#preset=model&at=60.1"))
	browsertest.Prefer(t, p.tab, "prefers-reduced-motion", "reduce")
	require.Equal(t, "Play", runs(url))
	require.Equal(t, []float64{500}, play[[]float64](t, p, `
		const delays = [];
		window.requestAnimationFrame = () => delays.push(0);
		window.setTimeout = (run, ms) => delays.push(ms);
		document.getElementById('run').click();
		return delays;`), "it draws every half second, in no animation frame")
	require.Equal(t, "0s", play[string](t, p, `return getComputedStyle(document.getElementById('run')).transitionDuration;`))
}

// TestKeyboard does everything without a mouse.
func TestKeyboard(t *testing.T) {
	t.Parallel()
	url := serve(t)
	p := open(t, url)
	p.press(t, " ")
	require.Equal(t, "Pause", p.text(t, "run"))
	play[bool](t, p, `
		const begun = () => document.getElementById('scrub').value !== '0';
		while (!begun()) await new Promise(requestAnimationFrame);
		return true;`)
	for _, c := range []struct{ keys, id, want string }{
		{" ", "run", "^Play$"},
		{"", "said", "^Time stands still at"},
		{"0", "time", `^0 s$`},
		{"...", "time", `^0\.05 s$`},
		{",", "time", `^0\.033 s$`},
		{"", "said", `0\.033 s\. Token bucket: Admitted at 0\.033 s, 47\.33 of 50\.`},
		{"]", "speed-told", `^0\.5×$`},
		{"[[[[", "speed-told", `^0\.1×$`},
		{"]]]]]]]]]]]]", "speed-told", "^60×$"},
		{"n", "story", "A meter holds ten quarters"},
		{"", "said", `Parking meter\. A meter holds`},
		{"pp", "story", "Jobs reserve"},
	} {
		p.press(t, c.keys)
		require.Regexp(t, c.want, p.text(t, c.id), "%q", c.keys)
	}
	p.follow(t, "#preset=boundary&leaky=queue&at=10.9")
	p.press(t, ".")
	require.Equal(t, "11 s", p.text(t, "time"), "a step to what runs later")

	play[bool](t, p, `document.getElementById('rate').focus(); document.getElementById('rate').select(); return true;`)
	story := p.text(t, "story")
	p.press(t, "0.5n")
	require.Equal(t, "0.5", play[string](t, p, `return document.getElementById('rate').value;`), "fields keep their keys")
	require.Equal(t, story, p.text(t, "story"))
	play[bool](t, p, `document.querySelector('details').open = true; document.getElementById('keys').click(); document.activeElement.blur(); return true;`)
	p.press(t, "n")
	require.Equal(t, story, p.text(t, "story"), "the keys are switched off")

	missing := play[[]string](t, p, `
		document.activeElement.blur();
		const seen = new Set();
		window.addEventListener('focusin', (e) => seen.add(e.target));
		window.reached = () => [...document.querySelectorAll('button, input, select, a, summary')]
			.filter((e) => e.checkVisibility() && !seen.has(e) && !(e.type === 'radio' && !e.checked)).map((e) => e.id || e.tagName);
		return window.reached();`)
	for range len(missing) + 1 {
		p.press(t, "\t")
	}
	require.NotEmpty(t, missing)
	require.Empty(t, play[[]string](t, p, `return window.reached();`), "the tab key reaches every control")
	for _, asked := range p.watch.Requests() {
		if asked != "about:blank" && asked != "data:," {
			require.Regexp(t, "^"+url+`([a-z]+\.(js|css))?(#.*)?$`, asked, "the page asks for its files only")
		}
	}
}

// TestAnnouncementsToScreenReadersAreFew runs an example to its end on a clock of the test's own, and counts the
// announcements to screen readers.
func TestAnnouncementsToScreenReadersAreFew(t *testing.T) {
	t.Parallel()
	p := open(t, serve(t))
	require.Equal(t, []string{"refused", "said"}, play[[]string](t, p, `
		return [...document.querySelectorAll('[aria-live], output, [role=status], [role=alert], [role=log], [role=timer]')].map((e) => e.id);`))
	said := play[[]string](t, p, `
		const said = document.getElementById('said'), heard = [];
		let frame, ms = performance.now();
		performance.now = () => ms;
		window.requestAnimationFrame = (run) => { frame = run; };
		const note = () => { if (heard.at(-1) !== said.textContent) heard.push(said.textContent); };
		document.getElementById('run').click();
		let frames = 0;
		for (; frame; frames++, ms += 100) {
			note();
			const run = frame;
			frame = null;
			run();
		}
		note();
		return [...heard, String(frames > 100)];`)
	require.Len(t, said, 3)
	require.Equal(t, "Time runs.", said[0])
	require.Regexp(t, `^The end\. 3.s\. Token bucket: Refused at 2\.983`, said[1])
	require.Equal(t, "true", said[2])
}

// TestAPhonesWidth shows every example, with folded parts, without scrolling to the side.
func TestAPhonesWidth(t *testing.T) {
	t.Parallel()
	p := open(t, serve(t))
	for _, width := range []int64{320, 360, 390, 768, 1280} {
		require.NoError(t, chromedp.Do(p.tab, chromedp.EmulateViewport(width, 800)))
		wide := play[[]float64](t, p, `
			document.querySelector('details').open = true;
			return [...document.querySelectorAll('[name=preset]')].map((preset) => {
				preset.click();
				set('scrub', document.getElementById('scrub').max * 0.7);
				return document.scrollingElement.scrollWidth;
			});`)
		require.Len(t, wide, 11)
		require.LessOrEqual(t, slices.Max(wide), float64(width), "%v", wide)
	}
}

// TestPreferences shows the page as the user prefers it: forced colours keep the chosen example and the marks apart, a
// low screen (as of a page that is magnified to 200 %) keeps no part of the page on it, and paper gets dark text
// without buttons.
func TestPreferences(t *testing.T) {
	t.Parallel()
	p := open(t, serve(t))
	browsertest.Prefer(t, p.tab, "forced-colors", "active")
	p.press(t, "d") // which forces no other paper
	require.Equal(t, []string{}, play[[]string](t, p, `
		const colour = (selector, pseudo) => getComputedStyle(document.querySelector(selector), pseudo).backgroundColor;
		const paper = colour('body'), wrong = [];
		if (colour('#preset-sixty + label') === colour('#preset-meter + label')) wrong.push('the example');
		for (const mark of ['held', 'owed', 'admitted', 'refused', 'reserved', 'runs']) {
			if ([paper, 'rgba(0, 0, 0, 0)'].includes(colour('.key.' + mark))) wrong.push(mark);
		}
		if (colour('.now', '::before') === paper) wrong.push('the answer');
		if (getComputedStyle(document.querySelector('.veil')).fill !== paper) wrong.push('the veil');
		return wrong;`))
	for height, want := range map[int64]string{740: "sticky", 400: "static"} {
		require.NoError(t, chromedp.Do(p.tab, chromedp.EmulateViewport(640, height)))
		require.Equal(t, want, play[string](t, p, `return getComputedStyle(document.querySelector('.transport')).position;`))
	}
	browsertest.Prefer(t, p.tab, "forced-colors", "none", "prefers-color-scheme", "light")
	_, err := chromedp.Call(p.tab, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Media: "print"})
	require.NoError(t, err)
	require.Equal(t, "rgb(35, 38, 43)", play[string](t, p, `return getComputedStyle(document.body).color;`))
	require.Empty(t, p.text(t, "run"))
	require.Contains(t, p.text(t, "lane-token"), "10 tokens a second, at most 50 kept")
}

// TestWithoutJavaScript says that it is needed, and shows nothing that would not work.
func TestWithoutJavaScript(t *testing.T) {
	t.Parallel()
	url := serve(t)
	p := open(t, url)
	_, err := chromedp.Call(p.tab, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: true})
	require.NoError(t, err)
	p.goTo(t, url)
	text, err := chromedp.Run(p.tab, chromedp.Evaluate[string](`document.body.innerText`))
	require.NoError(t, err)
	require.Equal(t, []string{"Rate limits, a playground", "The playground computes in the browser and needs JavaScript."},
		strings.FieldsFunc(text, func(r rune) bool { return r == '\n' }))
}

// TestDarkAndLight follows the system, and the switch where it was used.
func TestDarkAndLight(t *testing.T) {
	t.Parallel()
	p := open(t, serve(t))
	look := func() string {
		return play[string](t, p, `
			for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame); // before which pages hear what is preferred
			return getComputedStyle(document.body).backgroundColor + ' ' + document.getElementById('theme').ariaPressed;`)
	}
	const light, dark = "rgb(247, 245, 240) false", "rgb(20, 23, 28) true"
	browsertest.Prefer(t, p.tab, "prefers-color-scheme", "light")
	require.Equal(t, light, look())
	browsertest.Prefer(t, p.tab, "prefers-color-scheme", "dark")
	require.Equal(t, dark, look())
	p.press(t, "d")
	require.Equal(t, light, look())
	browsertest.Prefer(t, p.tab, "prefers-color-scheme", "light")
	require.NoError(t, chromedp.Do(p.tab, chromedp.Click("#theme")))
	require.Equal(t, dark, look())
}

// TestAccessibility has axe-core look at the page, light and dark, wide and narrow.
func TestAccessibility(t *testing.T) {
	t.Parallel()
	p := open(t, serve(t))
	fragments := []string{"#preset=sixty", "#preset=model&at=60", "#preset=credit&pattern=bursty&at=3", "#preset=nothing"}
	for i, scheme := range []string{"light", "dark"} {
		browsertest.Prefer(t, p.tab, "prefers-color-scheme", scheme, "prefers-reduced-motion", "reduce") // colours change at once
		for j, fragment := range fragments {
			width := []int64{360, 1280}[(i+j)%2] // each two of the three meet
			require.NoError(t, chromedp.Do(p.tab, chromedp.EmulateViewport(width, 900)))
			p.follow(t, fragment)
			play[bool](t, p, `
				document.querySelector('details').open = true;
				set('rate', '-1'); // with what is said of it
				return true;`)
			require.Empty(t, browsertest.Axe(t, p.tab), "%s, %d wide, %s", scheme, width, fragment)
		}
	}
}
