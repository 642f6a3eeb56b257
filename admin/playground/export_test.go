package playground

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWriteHTML(t *testing.T) {
	t.Parallel()
	var first, second bytes.Buffer
	require.NoError(t, WriteHTML(&first))
	require.NoError(t, WriteHTML(&second))
	require.Equal(t, first.String(), second.String(), "the same bytes each time, for whoever keeps them in a repository")
	text := first.String()
	require.NotContains(t, text, "unsafe-")
	require.NotContains(t, text, "src=")
	require.NotContains(t, text, "style=")
	require.NotContains(t, text, "import ")
	require.NotRegexp(t, `(?i) on\w+="`, text)
	require.Equal(t, 1, strings.Count(text, "</script>"))

	gone := errors.New("the disk is full")
	reader, writer := io.Pipe()
	require.NoError(t, reader.CloseWithError(gone))
	require.ErrorIs(t, WriteHTML(writer), gone)
}

// TestBundleRejectsUnsupportedModules keeps a module that the export would get wrong from being exported.
func TestBundleRejectsUnsupportedModules(t *testing.T) {
	t.Parallel()
	for text, problem := range map[string]string{
		"import * as all from './other.js';":               "no import of names",
		"import { one as two } from './other.js';":         "no import of names",
		"import './other.js';":                             "no import of names",
		"import { one } from 'https://example.com/one.js'": "no import of names",
		"import { one } from './missing.js';":              "no module missing.js",
		"import { two } from './other.js';":                "other.js exports no two",
		"import { self } from './main.js';":                "main.js exports no self",
		"export default 1;":                                "no export of a constant",
		"export { one };":                                  "no export of a constant",
		"const a = '</script>';":                           "would end the script",
		"const a = '<!-- ';":                               "would end the script",
	} {
		_, err := bundle(map[string][]byte{"main.js": []byte(text), "other.js": []byte("export const one = 1, two = 2;\n")}, "main.js")
		require.ErrorContains(t, err, problem, text)
	}
	script, err := bundle(map[string][]byte{
		"main.js":  []byte("import { one } from './other.js';\nimport { two } from './more.js';\none + two();\n"),
		"more.js":  []byte("import { one } from './other.js';\nexport function two() { return one; }\n"),
		"other.js": []byte("export const one = 1;\n"),
	}, "main.js")
	require.NoError(t, err)
	require.Equal(t, `const modules = {};
modules['other.js'] = (() => {
const one = 1;
return { one };
})();
modules['more.js'] = (() => {
const { one } = modules['other.js'];
function two() { return one; }
return { two };
})();
modules['main.js'] = (() => {
const { one } = modules['other.js'];
const { two } = modules['more.js'];
one + two();
return {  };
})();
`, string(script))
}

// TestEveryFileIsUsed finds files that nothing needs.
func TestEveryFileIsUsed(t *testing.T) {
	t.Parallel()
	files := read()
	b := bundler{files: files, exports: make(map[string][]string)}
	require.NoError(t, b.add("main.js"))
	for name := range files {
		if strings.HasSuffix(name, ".js") {
			require.Contains(t, b.exports, name)
		}
		lines := bytes.Count(files[name], []byte("\n"))
		require.Less(t, lines, 400, "%s is longer than a sitting", name)
	}
	files[index] = []byte(charset + styleLink + styleLink + scriptLink)
	_, err := export(files)
	require.ErrorContains(t, err, "it must be there once")
}
