package playground_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"
)

// TestALinkContainsTheCurrentView changes settings on the page, and opens the link in another.
func TestALinkContainsTheCurrentView(t *testing.T) {
	t.Parallel()
	url := serve(t)
	p := open(t, url)
	play[bool](t, p, `
		document.getElementById('preset-three').click();
		set('rate', '25');
		set('verb', 'reserve', 'change');
		set('maxReserved', '12.5');
		set('pattern', 'poisson', 'change');
		set('seed', '77');
		set('scrub', '4500000');
		return true;`)
	link := play[string](t, p, `return document.getElementById('link').href;`)
	require.Equal(t, url+"#preset=three&rate=25&maxReserved=12.5&seed=77&verb=reserve&pattern=poisson&at=4.5", link)
	require.Equal(t, link, play[string](t, p, `return location.href;`))
	shown := p.text(t, "lanes")

	p.goTo(t, link)
	require.Equal(t, shown, p.text(t, "lanes"))
	require.Equal(t, "4.5 s", p.text(t, "time"))
	require.True(t, play[bool](t, p, `return document.getElementById('refused').hidden;`))
	require.Contains(t, p.text(t, "changed"), "You have changed this example.")
	play[bool](t, p, `document.getElementById('undo').click(); return true;`)
	require.Equal(t, url+"#preset=three", play[string](t, p, `return location.href;`))

	p.follow(t, "#preset=half&at=3")
	require.Equal(t, "3 s", p.text(t, "time"), "a link to a page that is open")
	move := func(way string) string {
		return play[string](t, p, `
			const followed = new Promise((resolve) => addEventListener('hashchange', resolve, { once: true }));
			history.`+way+`();
			await followed;
			return location.hash + ' ' + document.getElementById('story').textContent;`)
	}
	require.Regexp(t, "^#preset=three Three tokens", move("back"))
	require.Regexp(t, "^#preset=half&at=3 A third party", move("forward"))

	text, err := os.ReadFile("../../../docs/admin.md")
	require.NoError(t, err)
	links := regexp.MustCompile("`(#[^`]+)`").FindAllSubmatch(text, -1)
	require.Len(t, links, 2)
	for _, link := range links { // the documented ones
		p.goTo(t, url+string(link[1]))
		require.Empty(t, p.text(t, "refused"), string(link[1]))
		require.Equal(t, url+string(link[1]), play[string](t, p, `return location.href;`))
	}
	t.Run("AnySettingsThereAndBack", func(t *testing.T) {
		require.Empty(t, play[string](t, p, `
			const { PRESETS } = await import('./presets.js');
			const { CHOICES, NUMBERS, fromFragment, toFragment } = await import('./settings.js');
			const { randomOf } = await import('./load.js');
			const random = randomOf(20260302);
			const one = (list) => list[Math.floor(random() * list.length)];
			for (let i = 0; i < 2000; i++) {
				const preset = one(PRESETS), settings = { ...preset.settings };
				for (const [name, { min, max, whole, optional }] of Object.entries(NUMBERS)) {
					const any = Number((min + random() * (max - min)).toFixed(3));
					settings[name] = one([settings[name], min, max, whole ? Math.round(any) : any, optional ? null : max]);
				}
				for (const [name, { of }] of Object.entries(CHOICES)) settings[name] = one(Object.keys(of));
				if (!preset.script && settings.pattern === 'preset') settings.pattern = 'even';
				const at = Math.floor(random() * settings.span * 1e6);
				const link = toFragment(preset, settings, at), read = fromFragment(link, PRESETS);
				const wanted = JSON.stringify({ preset: preset.id, settings, at, error: '' });
				if (JSON.stringify({ ...read, preset: read.preset.id }) !== wanted) return link + ' ' + wanted + ' ' + JSON.stringify(read);
			}
			return '';`))
	})
}

// TestABadLinkIsRefused opens links that the page would not make. They are rejected as a whole, and the page works.
func TestABadLinkIsRefused(t *testing.T) {
	t.Parallel()
	url := serve(t)
	p := open(t, url)
	for fragment, says := range map[string]string{
		"#preset=nothing":                       "it names a preset that there is not",
		"#preset=sixty&rate=-5":                 "rate is a number from 0.1 to 100000",
		"#preset=sixty&rate=1e9":                "rate is a number from",
		"#preset=sixty&rate=NaN":                "rate is a number from",
		"#rate=":                                "rate is a number from",
		"#rate=5&rate=6":                        "it says something twice",
		"#burst=2.5":                            "burst is a whole number from 1 to 500",
		"#verb=steal":                           "verb is one of take, reserve",
		"#verb=constructor":                     "verb is one of take, reserve",
		"#pattern=preset":                       "its preset has no load of its own",
		"#__proto__=1":                          "it has a setting that there is not",
		"#toString=1":                           "it has a setting that there is not",
		"#at=4":                                 "at is a number of seconds from 0 to 3",
		"#at=-1":                                "at is a number of seconds from 0 to 3",
		"#at=0x1":                               "at is a number of seconds",
		"#%E0%A4%A":                             "it has a setting that there is not",
		"#<script>alert(1)</script>":            "it has a setting that there is not",
		"#preset=" + strings.Repeat("x", 1_000): "longer than 1000 characters",
	} {
		p.follow(t, fragment)
		text := p.text(t, "refused")
		require.Contains(t, text, "The link is not used: ", fragment)
		require.Contains(t, text, says, fragment)
		require.Contains(t, p.text(t, "story"), "A full bucket of 50", fragment)
		require.Contains(t, p.text(t, "lane-token"), "10 tokens a second, at most 50 kept", fragment)
	}
	p.press(t, "n")
	require.Empty(t, p.text(t, "refused"), "that was the link, and this is another example")

	p.goTo(t, url+"#preset=nothing")
	require.Contains(t, p.text(t, "refused"), "The link is not used: ")
}

// TestSettings enters valid and invalid settings, by sliders and as text.
func TestSettings(t *testing.T) {
	t.Parallel()
	p := open(t, serve(t))
	t.Run("AreErrors", func(t *testing.T) {
		play[bool](t, p, `set('capacity', '100001'); return true;`)
		require.Equal(t, "Capacity is a number from 0 to 100000, with at most six decimals and no exponent", p.text(t, "capacity-wrong"))
		require.Contains(t, p.text(t, "lane-token"), "at most 50 kept", "what was wrong is not used")
	})
	t.Run("ChangeTheView", func(t *testing.T) {
		p.follow(t, "#preset=sixty&at=1")
		require.Contains(t, p.text(t, "lane-token"), "Admitted 60 Refused 1 ")
		play[bool](t, p, `set('capacity-slider', 0); return true;`)
		require.Equal(t, "1 s", p.text(t, "time"))
		require.Contains(t, p.text(t, "lane-token"), "Admitted 0 Refused 61 ")
		require.Equal(t, "Pause", play[string](t, p, `
			document.getElementById('undo').click();
			document.getElementById('run').click();
			set('capacity-slider', 0);
			return document.getElementById('run').textContent;`), "time goes on")
		p.press(t, "0")
	})
	t.Run("FollowTheSliders", func(t *testing.T) {
		wrong := play[[]string](t, p, `
			const { CHOICES, NUMBERS, problem } = await import('./settings.js');
			document.getElementById('preset-model').click();
			const wrong = [];
			for (const pattern of Object.keys(CHOICES.pattern.of)) {
				set('pattern', pattern, 'change');
				for (const name of Object.keys(NUMBERS)) {
					const slider = document.getElementById(name + '-slider'), field = document.getElementById(name);
					if (!slider.checkVisibility()) continue;
					const before = slider.value;
					for (const step of ['0', '1', '100', String(slider.max - 1), slider.max, before]) {
						set(slider.id, step);
						const value = field.value === '' ? null : Number(field.value);
						if (problem(name, value) || slider.value !== step) wrong.push([pattern, name, step, slider.value, field.value].join(' '));
					}
				}
			}
			return wrong;`)
		require.Empty(t, wrong)
	})
	t.Run("AreShownIfTheyMatter", func(t *testing.T) {
		for fragment, shown := range map[string]bool{"": false, "&verb=reserve": true, "&leaky=queue": false, "&leaky=queue&capacity=0": true} {
			p.follow(t, "#preset=sixty"+fragment+"&at=3")
			before := p.text(t, "lanes")
			require.Equal(t, shown, play[bool](t, p, `
				const field = document.getElementById('maxReserved'), shown = field.checkVisibility();
				set('maxReserved', '3');
				return shown;`), fragment)
			require.Equal(t, shown, before != p.text(t, "lanes"), fragment)
		}
	})
	t.Run("ChangeWithEachStepOfASlider", func(t *testing.T) {
		p.follow(t, "#preset=sixty&pattern=bursty&burst=1")
		play[bool](t, p, `document.getElementById('burst-slider').focus(); return true;`)
		for _, burst := range []string{"2", "3", "4"} {
			p.press(t, kb.ArrowRight)
			require.Equal(t, burst, play[string](t, p, `return document.getElementById('burst').value;`))
		}
	})
	t.Run("NeverMakeMoreThanThereIsRoomFor", func(t *testing.T) {
		require.True(t, play[bool](t, p, `return document.getElementById('capped').hidden;`))
		play[bool](t, p, `
			document.getElementById('preset-sixty').click();
			set('span', 3600);
			set('load', 1000);
			set('scrub', 3600e6);
			return true;`)
		require.Equal(t, "Only the first 2,000 requests are simulated.", p.text(t, "capped"))
		require.Contains(t, p.text(t, "lane-token"), "Admitted 69 Refused 1,931")
	})
}
