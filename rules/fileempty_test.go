package rules_test

import (
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/rules"
)

// For each of these the YAML library copies what was read, or what follows, so that many of them would take hours.
func TestReadBoundsWhatIsEmpty(t *testing.T) {
	t.Parallel()
	const blank, empty = "more than 100 blank lines in a row", "more than 1000 entries and fields without a value"
	for name, c := range map[string]struct {
		before, repeated, after string
		most                    int
		want                    string
	}{
		"BlankLines":          {"\n", "\n", "", 99, blank},
		"BlankLinesAfterWord": {"a: |\n x\n", "\n", "b: 1\n", 100, blank},
		"LinesOfSpaces":       {"a: |\n x\n", "  \t\n", "", 100, blank},
		"LinesOfWindows":      {"a: |\r\n x\r\n", "\r\n", "", 100, blank},
		"LinesOfOldMacs":      {"a: |\r x\r", "\r", "", 100, blank},
		"Dashes":              {"", "-\n", "- a\n", 1000, empty},
		"DashesAtTheEnd":      {"- a\n", "-\n", "", 1000, empty},
		"DashesBetweenWords":  {"", "- # comment\n- a\n", "", 1000, empty},
		"DashesInDashes":      {"", "- -\n", "", 1000, empty},
		"Fields":              {"", "- a:\n", "", 1000, empty},
		"FieldsOfOneMap":      {"", "- a:\n  b:\n", "", 500, empty},
		"FieldsInBraces":      {"[", "{a: },", "a]", 1000, empty},
		"KeysInBraces":        {"[", "{a, 'b'},\n", "a]", 500, empty},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := rules.Read(strings.NewReader(c.before + strings.Repeat(c.repeated, c.most) + c.after))
			if err != nil {
				require.NotContains(t, err.Error(), c.want)
			}
			_, err = rules.Read(strings.NewReader(c.before + strings.Repeat(c.repeated, c.most+1) + c.after))
			require.ErrorIs(t, err, rules.ErrInvalid)
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestReadTakesWhatHasAValueElsewhere(t *testing.T) {
	t.Parallel()
	for name, record := range map[string]string{
		"OnTheNextLine":  "-\n  limit:\n    l%d\n  rps: 1\n",
		"InBraces":       "- {limit: l%d, rps: 1, adaptive: {floor: 0.1, growth: 0.1, epoch: 1s, apply: true}}\n",
		"BehindComments": "- # a rule\n  limit: # the name\n    l%d\n  rps: 1\n",
		"Quoted":         "- limit: \"l%d\"\n  'rps': 1\n  description: |\n    a text\n\n    of lines\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var text strings.Builder
			for i := range 1001 {
				text.WriteString(strings.ReplaceAll(record, "%d", strconv.Itoa(i)))
			}
			d, err := rules.Read(strings.NewReader(text.String()))
			require.NoError(t, err)
			require.Len(t, d.Rules, 1001)
		})
	}
	_, err := rules.Read(strings.NewReader("match: all\nrules:\n- {limit: a, rps: 1}\ntiers:\n- limit: a\n  when:\n    plan: free\n"))
	require.NoError(t, err)
}
