package playground

import (
	"bytes"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// The forms of import and export that the modules use, each a line.
var (
	importLine = regexp.MustCompile(`^import \{ (\w+(?:, \w+)*) \} from '\./([\w.]+)';$`)
	exportLine = regexp.MustCompile(`^export (?:const|function\*?) (\w+)`)
)

// bundler puts modules into one script, each after its imports. A module becomes a function that returns its exports,
// so names that are not exported cannot collide.
type bundler struct {
	files   map[string][]byte
	exports map[string][]string // of the modules that are in out, or on their way
	out     bytes.Buffer
}

// bundle returns the module called main, and all that it needs, as one script. It knows no more of the language than
// the forms above, and returns an error for a module that uses others.
func bundle(files map[string][]byte, main string) ([]byte, error) {
	b := bundler{files: files, exports: make(map[string][]string)}
	b.out.WriteString("const modules = {};\n")
	if err := b.add(main); err != nil {
		return nil, err
	}
	for _, tag := range []string{"</script", "<!--"} {
		if bytes.Contains(bytes.ToLower(b.out.Bytes()), []byte(tag)) {
			return nil, fmt.Errorf("playground: a module has %q in it, which would end the script; write it in two parts", tag)
		}
	}
	return b.out.Bytes(), nil
}

// add adds the module called name after its imports.
func (b *bundler) add(name string) error {
	if _, added := b.exports[name]; added {
		return nil
	}
	b.exports[name] = nil
	text, found := b.files[name]
	if !found {
		return fmt.Errorf("playground: there is no module %s", name)
	}
	var body strings.Builder
	for line := range strings.Lines(string(text)) {
		bare := strings.TrimRight(line, "\r\n")
		switch {
		case strings.HasPrefix(bare, "import "):
			parts := importLine.FindStringSubmatch(bare)
			if parts == nil {
				return fmt.Errorf("playground: %s: %q is no import of names from a file beside it", name, bare)
			}
			if err := b.add(parts[2]); err != nil {
				return err
			}
			for wanted := range strings.SplitSeq(parts[1], ", ") {
				if !slices.Contains(b.exports[parts[2]], wanted) {
					return fmt.Errorf("playground: %s: %s exports no %s, each on a line of its own, before it is needed", name,
						parts[2], wanted)
				}
			}
			fmt.Fprintf(&body, "const { %s } = modules['%s'];\n", parts[1], parts[2])
		case strings.HasPrefix(bare, "export "):
			parts := exportLine.FindStringSubmatch(bare)
			if parts == nil {
				return fmt.Errorf("playground: %s: %q is no export of a constant or a function", name, bare)
			}
			b.exports[name] = append(b.exports[name], parts[1])
			body.WriteString(strings.TrimPrefix(line, "export "))
		default:
			body.WriteString(line)
		}
	}
	fmt.Fprintf(&b.out, "modules['%s'] = (() => {\n%sreturn { %s };\n})();\n", name, body.String(),
		strings.Join(b.exports[name], ", "))
	return nil
}
