package cli_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// TestScripts runs the commands of each file of testdata/script on a database of its own, and compares their outputs
// with the file. -update writes the outputs. A line that begins with "$ " is a command. The lines up to the next empty
// line are its output, its errors and its exit code. Files follow as in a txtar archive. Some commands are not commands
// of the program:
//
//	empty                                  uses a database without tables from here on
//	env NAME=VALUE                         sets a variable from here on
//	put FILE [INSTANT]                     stores the rules and overrides of a file, in effect at once or from an instant
//	sql STATEMENT                          runs a statement, and prints its rows
//	reserve LIMIT KEY COST                 reserves tokens, of 10 a week if there is no rule
//	acquire LIMIT KEY SLOTS                takes a lease
//	refuse LIMIT ROUTE KEY NUMBER AGO      counts refusals
//	cat FILE                               prints a file
//
// DATABASE stands for the connection string, START for the time of the test, WINDOW for a policy of 3 tokens whose
// window does not end, RESERVATION for the last reservation, and FENCE for the fencing token of the last lease. "<
// FILE" at the end of a command is its standard input, and "> FILE" a new file for its output.
func TestScripts(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join("testdata", "script", "*.txt"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, path := range files {
		name := filepath.Base(path)
		t.Run(strings.TrimSuffix(name, ".txt"), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			testkit.Golden(t, "script/"+name, newScript(t, string(text)).run(t))
		})
	}
}

// script is one file of testdata/script.
type script struct {
	f     *fixture
	lines []string // without outputs
	files string   // the part with the files
	names []string // pairs for a strings.Replacer
	last  string   // the last reservation
	fence string   // of the last lease

	fences []string // pairs for a strings.Replacer
}

var fileHeads = regexp.MustCompile(`(?m)^-- (\S+) --\n`)

func newScript(t *testing.T, text string) *script {
	t.Helper()
	start := time.Now().UTC().Format(time.RFC3339)
	s := &script{f: setup(t), names: []string{"START", start, "WINDOW", "'kind: fixed window, rate: 3, period: week, start: " + start + "'"}}
	heads := append(fileHeads.FindAllStringSubmatchIndex(text, -1), []int{len(text)})
	for i, head := range heads[:len(heads)-1] {
		name := text[head[2]:head[3]]
		s.names = append(s.names, name, file(t, name, strings.ReplaceAll(text[head[1]:heads[i+1][0]], "START", start)))
	}
	s.files = text[heads[0][0]:]
	isOutput := false
	for line := range strings.Lines(text[:heads[0][0]]) {
		isCommand := strings.HasPrefix(line, "$ ")
		if isCommand || line == "\n" || strings.HasPrefix(line, "# ") {
			s.lines, isOutput = append(s.lines, line), isCommand
		}
		require.True(t, isCommand || isOutput || line == "\n" || strings.HasPrefix(line, "# "), "%q belongs to no command", line)
	}
	return s
}

// run runs the commands, and returns the file with their outputs.
func (s *script) run(t *testing.T) string {
	t.Helper()
	var text strings.Builder
	for i, line := range s.lines {
		if i > 0 && strings.HasPrefix(line, "$ ") && strings.HasPrefix(s.lines[i-1], "$ ") {
			text.WriteString("\n")
		}
		text.WriteString(line)
		if command, is := strings.CutPrefix(line, "$ "); is {
			text.WriteString(s.steady(s.do(t, strings.TrimSpace(command))))
		}
	}
	return text.String() + s.files
}

// do runs a command, and returns its outputs.
func (s *script) do(t *testing.T, command string) string {
	t.Helper()
	command = strings.NewReplacer(append(slices.Clone(s.names), "=DATABASE", "="+s.f.url, "RESERVATION", s.last, "FENCE", s.fence)...).Replace(command)
	args := split(command)
	switch args[0] {
	case "ratelimit":
		return s.ratelimit(t, command)
	case "empty":
		s.f = on(t, postgrestest.NewEmptyDatabase(t))
	case "env":
		s.f.env = append(s.f.env, args[1])
	case "put":
		s.put(t, args[1:])
	case "sql":
		return s.query(t, strings.TrimPrefix(command, "sql "))
	case "acquire":
		s.acquire(t, args[1], args[2], number(t, args[3]))
	case "reserve":
		s.last = s.f.reserve(t, args[1], args[2], number(t, args[3]))
	case "refuse":
		ago, err := time.ParseDuration(args[5])
		require.NoError(t, err)
		s.f.refuse(t, args[1], args[2], args[3], int64(number(t, args[4])), ago)
	case "cat":
		return content(t, args[1])
	default:
		require.Fail(t, "there is no such command", command)
	}
	return ""
}

// ratelimit runs the program.
func (s *script) ratelimit(t *testing.T, command string) string {
	t.Helper()
	command, target, redirected := strings.Cut(command, " > ")
	command, input, hasInput := strings.Cut(command, " < ")
	if hasInput {
		input = content(t, input)
	}
	r := s.f.feed(t, input, split(command)[1:]...)
	if r.code != 0 {
		r.err += fmt.Sprintf("[exit code %d]\n", r.code)
	}
	if redirected {
		s.names = append(s.names, target, file(t, target, r.out))
		return r.err
	}
	return r.out + r.err
}

// put stores the rules of a file.
func (s *script) put(t *testing.T, args []string) {
	t.Helper()
	document, err := rules.ReadFile(args[0])
	require.NoError(t, err)
	changes, edit := rules.Changes{Put: document.Rules, Override: document.Overrides}, rules.Edit{Author: "eve", Reason: "a test"}
	if len(document.Tiers.Tiers) > 0 {
		changes.Tiers = &document.Tiers
	}
	if len(args) > 1 {
		edit.From, err = time.Parse(time.RFC3339, args[1])
		require.NoError(t, err)
	}
	_, err = s.f.store.Apply(t.Context(), edit, changes)
	require.NoError(t, err)
}

func (s *script) query(t *testing.T, statement string) (text string) {
	t.Helper()
	rows, err := s.f.pool.Query(t.Context(), statement)
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		values, err := rows.Values()
		require.NoError(t, err)
		text += fmt.Sprintln(values...)
	}
	require.NoError(t, rows.Err())
	return text
}

func (s *script) acquire(t *testing.T, limit, key string, slots float64) {
	t.Helper()
	request := ratelimit.Define(limit, ratelimit.Concurrency{Slots: 5, Lease: time.Hour}).For(key).Cost(slots)
	lease, err := s.f.withRules(t).Acquire(t.Context(), request)
	require.NoError(t, err)
	require.True(t, lease.Allowed)
	s.fence = fmt.Sprint(lease.Fence)
	s.fences = append(s.fences, s.fence, "FENCE")
}

func content(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

func number(t *testing.T, text string) (n float64) {
	t.Helper()
	_, err := fmt.Sscan(text, &n)
	require.NoError(t, err)
	return n
}

var (
	anInstant  = regexp.MustCompile(`\b20[23]\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?(Z| \+0000 UTC)`)
	aDistance  = regexp.MustCompile(`INSTANT \((in [^d)]*|[^d)]* ago|now)\)`)
	someDays   = regexp.MustCompile(`INSTANT \((in )?\d+ days`)
	anID       = regexp.MustCompile(`\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b`)
	aWait      = regexp.MustCompile(`(retry after|full after|(?:retry|reset)_after_us:)( +)[1-9]\S*`)
	severalGap = regexp.MustCompile(`   +`)
)

// steady returns an output without what differs from run to run. The width of a column depends on how far away an
// instant is.
func (s *script) steady(text string) string {
	for i := 4; i < len(s.names); i += 2 { // the files
		text = strings.ReplaceAll(text, s.names[i+1], s.names[i])
	}
	text = strings.NewReplacer(s.fences...).Replace(text)
	text = aWait.ReplaceAllString(anID.ReplaceAllString(anInstant.ReplaceAllString(text, "INSTANT"), "ID"), "${1}${2}WAIT")
	if near := aDistance.ReplaceAllString(someDays.ReplaceAllString(text, "INSTANT (${1}N days"), "INSTANT"); near != text {
		text = severalGap.ReplaceAllString(near, "  ")
	}
	return strings.ReplaceAll(text, "\n\n", "\n|\n") // an empty line ends an output
}
