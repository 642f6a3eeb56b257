package cli

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/text/unicode/bidi"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The forms of an answer.
const (
	asTable = "table"
	asJSON  = "json"
	asYAML  = "yaml"
)

// output is where answers go. It remembers the first error, also of who does not look at it.
type output struct {
	to  io.Writer
	err error
}

// Write writes a part of an answer.
func (o *output) Write(text []byte) (int, error) {
	n, err := o.to.Write(text)
	if err != nil {
		err = fmt.Errorf("the answer cannot be written: %w", err)
		o.err = cmp.Or(o.err, err)
	}
	return n, err
}

// withOutput gives a command the flag -o, with more formats than table and json.
func (a *app) withOutput(cmd *cobra.Command, more ...string) *cobra.Command {
	formats := strings.Join(append([]string{asTable, asJSON}, more...), " or ")
	cmd.Flags().StringVarP(&a.options.format, "output", "o", asTable, formats)
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if !slices.Contains(strings.Split(formats, " or "), a.options.format) {
			return misused("the output is %.20q; use -o %s", a.options.format, formats)
		}
		return nil
	}
	return cmd
}

// isTable reports whether the answer is for people.
func (a *app) isTable() bool { return a.options.format == "" || a.options.format == asTable }

// show prints an answer: the value as JSON, or what fill makes of it.
func (a *app) show(value any, fill func(t *table)) error {
	if !a.isTable() {
		encoder := json.NewEncoder(a.out)
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")
		return encoder.Encode(value)
	}
	var t table
	fill(&t)
	return t.write(a.out)
}

// showList prints values as lines of a table with a head, or a sentence if there are none.
func showList[T any](a *app, values []T, none string, head []string, row func(v *T) []string) error {
	return a.show(list(values), func(t *table) {
		if len(values) == 0 {
			t.row(none)
			return
		}
		t.row(head...)
		for i := range values {
			t.row(row(&values[i])...)
		}
	})
}

// list returns values that JSON shows as an array, also when there are none.
func list[T any](values []T) []T {
	if values == nil {
		return []T{}
	}
	return values
}

// showDone prints what became of a change that is made.
func (a *app) showDone(value any, fill func(t *table)) error {
	if err := a.show(value, fill); err != nil {
		return fmt.Errorf("the command is done, but %w", err)
	}
	return nil
}

// count returns a number with its noun, which has a plural in s.
func count[N int | int64](n N, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// table is lines of cells. No cell can break a line or move what stands beside it.
type table struct{ text bytes.Buffer }

// row adds a line of a list, the first of which is its head.
func (t *table) row(cells ...string) {
	for i, cell := range cells {
		if i > 0 {
			t.text.WriteByte('\t')
		}
		t.text.WriteString(shown(cell))
	}
	t.text.WriteByte('\n')
}

// field adds a line with a name and a value, unless that is empty.
func (t *table) field(name, value string) {
	if value != "" {
		t.row(name, value)
	}
}

// gap adds an empty line, behind which the columns have widths of their own.
func (t *table) gap() { t.text.WriteByte('\n') }

// write lays the table out.
func (t *table) write(to io.Writer) error {
	w := tabwriter.NewWriter(to, 0, 8, 2, ' ', 0)
	if _, err := w.Write(t.text.Bytes()); err != nil {
		return err
	}
	return w.Flush()
}

// shown returns a text that is safe on a terminal. It quotes a text with characters that move the cursor, reverse the
// direction of writing or are invisible.
func shown(s string) string {
	if plain(s) {
		return s
	}
	return strconv.QuoteToASCII(s)
}

var bareWord = regexp.MustCompile(`^[\w.:/@-]+$`)

// shellWord returns a word of a command line for a shell.
func shellWord(word string) string {
	if bareWord.MatchString(word) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// undoOf returns the beginning of the command line that takes back what was done, in the same schema.
func (a *app) undoOf(command string, args []string, isStored bool) string {
	undo := "ratelimit " + command
	if a.options.schema != migrations.DefaultSchema {
		undo = "ratelimit --schema " + shellWord(a.options.schema) + " " + command
	}
	for _, arg := range args {
		undo += " " + shellWord(arg)
	}
	if isStored {
		undo += " --stored"
	}
	return undo
}

func plain(s string) bool {
	if !utf8.ValidString(s) || s != strings.TrimSpace(s) || strings.HasPrefix(s, `"`) {
		return false
	}
	for _, r := range s {
		if !strconv.IsPrint(r) || turns(r) {
			return false
		}
	}
	return true
}

// turns reports whether a character is written from right to left.
func turns(r rune) bool {
	if r < 0x80 {
		return false
	}
	properties, _ := bidi.LookupRune(r)
	class := properties.Class()
	return class == bidi.R || class == bidi.AL || class == bidi.AN
}

// lines returns a message of several lines with each of them as a terminal can show it.
func lines(s string) string {
	parts := strings.Split(strings.TrimRight(s, "\n"), "\n")
	for i, part := range parts {
		if !plain(strings.TrimSpace(part)) {
			parts[i] = strings.Trim(strconv.QuoteToASCII(part), `"`)
		}
	}
	return strings.Join(parts, "\n")
}

// keyText returns a key for people.
func keyText(key string) string {
	switch {
	case key == "":
		return "(shared)"
	case strings.HasPrefix(key, "("), strings.HasPrefix(key, `\`): // so that no key looks like what stands for none
		return `\` + key
	}
	return key
}

// number returns tokens for people, to the millionth.
func number(tokens float64) string {
	if math.Abs(tokens) < 1e12 {
		if tokens = math.Round(tokens*1e6) / 1e6; tokens == 0 {
			return "0"
		}
	}
	return strconv.FormatFloat(tokens, 'f', -1, 64)
}

// span returns a wait for people, to the next millisecond.
func span(d time.Duration) string {
	if rest := d % time.Millisecond; rest > 0 {
		d += time.Millisecond - rest
	}
	return d.String()
}

// instant returns an instant for people; the zero time is nothing.
func instant(at time.Time) string {
	if at.IsZero() {
		return ""
	}
	return at.UTC().Format("2006-01-02 15:04:05Z")
}

// instantFrom returns an instant for people with how far it is from now.
func instantFrom(at, now time.Time) string {
	if at.IsZero() {
		return ""
	}
	switch away := at.Sub(now).Round(time.Second); {
	case away > 0:
		return fmt.Sprintf("%s (in %s)", instant(at), distance(away))
	case away < 0:
		return fmt.Sprintf("%s (%s ago)", instant(at), distance(-away))
	}
	return instant(at) + " (now)"
}

// distance returns how far away an instant is. A Duration ends after 292 years.
func distance(d time.Duration) string {
	const most = 100 * 365 * ratelimit.Day
	switch {
	case d > most:
		return "more than 100 years"
	case d >= 2*ratelimit.Day:
		return fmt.Sprintf("%d days", d.Round(ratelimit.Day)/ratelimit.Day)
	}
	return d.String()
}
