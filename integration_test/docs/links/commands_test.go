package links_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	mdFence   = regexp.MustCompile("(?s)```.*?```")
	mdSpan    = regexp.MustCompile("`[^`]+`")
	words     = regexp.MustCompile(`(?:'[^']*'|"[^"]*"|[^\s'"])+`)
	topLevel  = regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz)\w+)\(`)
	goFlag    = regexp.MustCompile(`flags?\.\w+\((?:&[^,]+, )?"(\w+)"`)
	goTesting = []string{"args", "bench", "benchtime", "count", "cpu", "parallel", "race", "run", "short", "shuffle", "tags", "timeout", "v", "vet"}
)

// TestNamedCommandsExist promises that pages name no command that cannot be run: each target of make, package, test,
// benchmark and flag is there. The scenarios of the program bench are checked beside it.
func TestNamedCommandsExist(t *testing.T) {
	t.Parallel()
	named := 0
	for page, text := range pages(t, "*.md", "docs/*.md", "examples/*.md") {
		var commands []string
		for _, fence := range mdFence.FindAllString(text, -1) {
			commands = append(commands, strings.Split(fence, "\n")...)
		}
		for _, span := range mdSpan.FindAllString(mdFence.ReplaceAllString(text, ""), -1) {
			commands = append(commands, strings.ReplaceAll(strings.Trim(span, "`"), "\n", " "))
		}
		for _, command := range commands {
			c := checker{command: command, dir: root}
			for part := range strings.SplitSeq(command, "&&") {
				part, _, _ = strings.Cut(part, " #")
				c.check(words.FindAllString(part, -1))
			}
			named += c.named
			for _, wrong := range c.wrong {
				t.Errorf("%s names the command %q: %s", page, command, wrong)
			}
		}
	}
	require.Greater(t, named, 30)
}

// checker checks the parts of one command.
type checker struct {
	command, dir string
	named        int
	wrong        []string
}

func (c *checker) check(args []string) {
	for len(args) > 0 && regexp.MustCompile(`^[A-Z_]+=`).MatchString(args[0]) {
		args = args[1:]
	}
	if len(args) < 2 {
		return
	}
	switch verb := args[0] + " " + args[1]; {
	case args[0] == "cd":
		c.dir = filepath.Join(c.dir, args[1])
	case args[0] == "make":
		c.target(args[1:])
	case verb == "go test" || verb == "go run":
		c.named++
		c.goTool(args[1], args[2:])
	}
}

func (c *checker) fail(wrong ...string) { c.wrong = append(c.wrong, strings.Join(wrong, " ")) }

func (c *checker) target(args []string) {
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		c.fail(err.Error())
	}
	for _, name := range args {
		if strings.Contains(name, "=") {
			continue
		}
		c.named++
		if !strings.Contains(string(makefile), "\n"+strings.Trim(name, ",;.")+": ") {
			c.fail("make has no target", name)
		}
	}
}

// goTool checks the arguments of go test and go run.
func (c *checker) goTool(verb string, args []string) {
	patterns, flags, files := map[string]string{}, []string{}, ""
	for i := 0; i < len(args); i++ {
		switch name, isFlag := strings.CutPrefix(args[i], "-"); {
		case isFlag && verb == "run" && files != "": // of the program
			flags = append(flags, name)
		case isFlag:
			name, value, assigned := strings.Cut(name, "=")
			if !assigned && i+1 < len(args) && !slices.Contains([]string{"race", "short", "update", "v"}, name) {
				i++
				value = args[i]
			}
			patterns[name] = strings.Trim(value, `'"`)
			flags = append(flags, name)
		case verb == "run" && files != "":
		case args[i] == "." && c.dir == root: // in the reader's directory
		case strings.HasPrefix(args[i], ".") || strings.HasPrefix(args[i], module):
			files += c.read(verb, args[i])
		}
	}
	if files == "" { // a command of the reader's
		return
	}
	shared := c.read("test", "./internal/test/testkit") // tests have their flags
	for _, name := range flags {
		isDefined := slices.ContainsFunc(goFlag.FindAllStringSubmatch(files+shared, -1), func(m []string) bool { return m[1] == name })
		if !isDefined && !slices.Contains(goTesting, name) {
			c.fail("there is no flag", name)
		}
	}
	if verb == "run" {
		return
	}
	for _, kind := range []string{"run", "bench"} {
		if patterns[kind] != "" && !(kind == "run" && patterns["bench"] != "") {
			c.matches(files, patterns[kind], map[string]string{"run": "Test", "bench": "Benchmark"}[kind])
		}
	}
}

const module = "github.com/pgratelimit/pgratelimit/"

// read returns the text of the Go files of a package, or of all below it.
func (c *checker) read(verb, of string) string {
	dir := c.dir
	if path, ours := strings.CutPrefix(of, module); ours {
		dir, of = root, path
	} else if strings.HasPrefix(of, "./internal/") {
		dir = root
	}
	glob := []string{"*.go"}
	if path, all := strings.CutSuffix(of, "..."); all {
		of, glob = path, []string{"*.go", "*/*.go", "*/*/*.go"}
	}
	var text strings.Builder
	for _, g := range glob {
		paths, _ := filepath.Glob(filepath.Join(dir, of, g))
		for _, path := range paths {
			file, err := os.ReadFile(path)
			if err != nil {
				c.fail(err.Error())
			}
			text.Write(file)
		}
	}
	if text.Len() == 0 {
		c.fail("there is no package", of)
	}
	if verb == "run" && !strings.Contains(text.String(), "\npackage main\n") {
		c.fail(of, "is no program")
	}
	return text.String()
}

// matches checks that each alternative of a pattern matches a test.
func (c *checker) matches(files, pattern, prefix string) {
	top, _, _ := strings.Cut(pattern, "/")
	for alternative := range strings.SplitSeq(top, "|") {
		re, err := regexp.Compile(alternative)
		if err != nil {
			c.fail(err.Error())
			return
		}
		if !slices.ContainsFunc(topLevel.FindAllStringSubmatch(files, -1), func(m []string) bool {
			return strings.HasPrefix(m[1], prefix) && re.MatchString(m[1])
		}) {
			c.fail("no", prefix, "matches", alternative)
		}
	}
}
