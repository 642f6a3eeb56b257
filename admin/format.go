package admin

import (
	"cmp"
	"fmt"
	"html/template"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// functions are what the templates call.
func functions() template.FuncMap {
	return template.FuncMap{
		"link": link, "number": number, "whole": whole[int64], "span": span, "clock": clock, "stamp": stamp, "micros": micros,
		"when": when, "spell": spell,
		"plural": plural[int64], "several": plural[int], "modeClass": modeClass,
		"isPast": isPast, "fieldsOf": fieldsOf, "inWords": inWords, "dict": dict,
	}
}

// number returns tokens for people: to three digits after the point at most, with commas.
func number(n float64) string {
	digits := 3
	switch size := math.Abs(n); {
	case size >= 1e15:
		return strconv.FormatFloat(n, 'g', 6, 64)
	case size >= 1000:
		digits = 0
	case size >= 100:
		digits = 1
	case size >= 10:
		digits = 2
	case size > 0 && size < 0.001:
		return strconv.FormatFloat(n, 'g', 3, 64)
	}
	text := strconv.FormatFloat(n, 'f', digits, 64)
	if strings.Contains(text, ".") {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	if text == "-0" {
		return "0"
	}
	return commas(text)
}

// longNumber matches a number of five digits or more. A year has fewer.
var longNumber = regexp.MustCompile(`(^| )\d{5,}`)

// inWords returns a policy or a rule in words, with commas in its large numbers.
func inWords(policy any) string {
	return longNumber.ReplaceAllStringFunc(fmt.Sprint(policy), func(number string) string {
		digits := strings.TrimPrefix(number, " ")
		return number[:len(number)-len(digits)] + commas(digits)
	})
}

// whole returns a count with commas.
func whole[T int | int64](n T) string { return commas(strconv.FormatInt(int64(n), 10)) }

// commas puts a comma before each three digits of the whole part.
func commas(text string) string {
	digits, negative := strings.CutPrefix(text, "-")
	integer, fraction, hasFraction := strings.Cut(digits, ".")
	var out strings.Builder
	if negative {
		out.WriteByte('-')
	}
	for i, digit := range integer {
		if i > 0 && (len(integer)-i)%3 == 0 {
			out.WriteByte(',')
		}
		out.WriteRune(digit)
	}
	if hasFraction {
		out.WriteString("." + fraction)
	}
	return out.String()
}

// plural returns a count and the word for it.
func plural[T int | int64](n T, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return whole(n) + " " + word + "s"
}

// span returns a duration in the two largest units that say enough.
func span(d time.Duration) string {
	if d < 0 {
		d = -d
	}
	switch {
	case d < time.Millisecond:
		return strconv.FormatInt(d.Microseconds(), 10) + " µs"
	case d < time.Second:
		return strconv.FormatInt(d.Milliseconds(), 10) + " ms"
	case d < 10*time.Second:
		return strings.TrimSuffix(strconv.FormatFloat(d.Seconds(), 'f', 1, 64), ".0") + " s"
	case d < time.Minute:
		return strconv.FormatFloat(d.Seconds(), 'f', 0, 64) + " s"
	case d < time.Hour:
		return two(d, time.Minute, "min", time.Second, "s")
	case d < ratelimit.Day:
		return two(d, time.Hour, "h", time.Minute, "min")
	case d < 365*ratelimit.Day:
		return two(d, ratelimit.Day, "d", time.Hour, "h")
	}
	return strconv.FormatFloat(d.Hours()/24/365, 'f', 1, 64) + " years"
}

func two(d, large time.Duration, largeName string, small time.Duration, smallName string) string {
	d = d.Round(small)
	text := strconv.FormatInt(int64(d/large), 10) + " " + largeName
	if rest := d % large / small; rest > 0 {
		text += " " + strconv.FormatInt(int64(rest), 10) + " " + smallName
	}
	return text
}

// clock returns an instant for people, in UTC.
func clock(at time.Time) string {
	if at.IsZero() {
		return "never"
	}
	return at.UTC().Format("2006-01-02 15:04:05")
}

// stamp returns an instant for programs.
func stamp(at time.Time) string { return at.UTC().Format(time.RFC3339) }

// micros returns an instant as the tables have it.
func micros(at time.Time) string { return strconv.FormatInt(at.UnixMicro(), 10) }

// when returns how long ago, or in how long, an instant is.
func when(at, now time.Time) string {
	switch gap := at.Sub(now); {
	case at.IsZero():
		return "never"
	case gap > 0:
		return "in " + span(gap)
	case gap > -time.Second:
		return "just now"
	default:
		return span(gap) + " ago"
	}
}

// glyphs is a piece of a key. Where Code is set it stands for a character that cannot be seen, or that turns text
// around.
type glyphs struct {
	Text string
	Code bool
}

// spell returns a key for people. A character that is not plain text is replaced by its code.
func spell(key string) []glyphs {
	var out []glyphs
	add := func(text string, code bool) {
		if n := len(out); n > 0 && out[n-1].Code == code && !code {
			out[n-1].Text += text
			return
		}
		out = append(out, glyphs{text, code})
	}
	for i, r := range key {
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(key[i:], "\uFFFD"):
			add(fmt.Sprintf("%02X", key[i]), true)
		case r == ' ' && i > 0 && i < len(key)-1, unicode.IsPrint(r) && r != ' ':
			add(string(r), false)
		default:
			add(fmt.Sprintf("U+%04X", r), true)
		}
	}
	return out
}

// isPast reports whether an instant is over.
func isPast(at, now time.Time) bool { return !at.IsZero() && !at.After(now) }

// dict returns names with their values, for a template that needs more than one.
func dict(pairs ...any) (map[string]any, error) {
	if len(pairs)%2 != 0 {
		return nil, fmt.Errorf("dict: a name has no value")
	}
	values := make(map[string]any, len(pairs)/2)
	for i := 0; i < len(pairs); i += 2 {
		values[fmt.Sprint(pairs[i])] = pairs[i+1]
	}
	return values, nil
}

func modeClass(mode ratelimit.Mode) string { return string(cmp.Or(mode, ratelimit.On)) }
