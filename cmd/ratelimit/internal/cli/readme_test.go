package cli_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// TestReadme runs each command that docs/guide.md shows.
func TestReadme(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "waits two seconds until a rule begins")
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "docs", "guide.md"))
	require.NoError(t, err)
	f := on(t, postgrestest.NewEmptyDatabase(t))
	work := t.TempDir()
	files := map[string]string{
		"rules.yaml": "rules: [{limit: sendMessage, rate: 1, period: hour}]\n",
		"access.log": strings.Repeat("192.0.2.7 - - [22/Nov/2026:08:00:00 +0000] \"GET / HTTP/1.1\" 200 5\n", 3),
	}
	for name, content := range files {
		files[name] = filepath.Join(work, name)
		require.NoError(t, os.WriteFile(files[name], []byte(content), 0o600))
	}
	shows := map[string]string{
		"migrate up": "applied", "rules apply": "1 per hour", "get": "sendMessage", "top": "", "simulate": "192.0.2.7", "doctor": "",
	}
	for _, b := range blocks(t, string(text)) {
		for line := range strings.Lines(b.commands) {
			line, _, _ = strings.Cut(line, "#")
			command, ours := strings.CutPrefix(line, "ratelimit ")
			if !ours {
				continue
			}
			f.wait(t)
			r := f.run(t, arguments(command, files)...)
			require.Zero(t, r.code, "%s: %s", line, r.err)
			for begin, want := range shows {
				if strings.HasPrefix(command, begin) {
					require.Contains(t, r.out, want, line)
					delete(shows, begin)
				}
			}
		}
	}
	require.Empty(t, shows, "docs/guide.md does not show them")
}

// arguments returns the words of a command, with the places of the files that it names.
func arguments(command string, files map[string]string) (words []string) {
	for i, part := range strings.Split(command, `"`) {
		if i%2 == 1 { // it is quoted
			words = append(words, part)
			continue
		}
		for _, word := range strings.Fields(part) {
			if file, found := files[word]; found {
				word = file
			}
			words = append(words, word)
		}
	}
	return words
}
