package yamltext_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/pgratelimit/pgratelimit/internal/yamltext"
)

func TestFieldsKeepTheirOrder(t *testing.T) {
	t.Parallel()
	text, err := yamltext.FromJSON([]byte(`{"b": 1.5, "a": ["x", null, true], "at": "2030-01-01T12:00:00Z", "no": "no", "empty": [], "lines": "one\ntwo"}`))
	require.NoError(t, err)
	require.Equal(t, "b: 1.5\na:\n  - x\n  - null\n  - true\nat: \"2030-01-01T12:00:00Z\"\nno: no\nempty: []\nlines: |-\n  one\n  two\n", string(text))
	_, err = yamltext.FromJSON([]byte(`{`))
	require.Error(t, err)
}

// FuzzFromJSON promises that every text is read back as it was.
func FuzzFromJSON(f *testing.F) {
	for _, text := range []string{"", "\t\n", "a\n\tb", "\n\t", " \t\n a", "no", "1", "\x7f\u0085\ufeff", "a: b", "- ", "#", "<<"} {
		f.Add(text, text)
	}
	f.Fuzz(func(t *testing.T, key, value string) {
		if len(key) > 100 {
			return // YAML has no simple keys above 1024 characters, and escapes are long
		}
		data, err := json.Marshal(map[string]string{key: value})
		require.NoError(t, err)
		var want, got map[string]string
		require.NoError(t, json.Unmarshal(data, &want)) // invalid UTF-8 is replaced
		text, err := yamltext.FromJSON(data)
		require.NoError(t, err)
		require.NoError(t, yaml.Unmarshal(text, &got), "%s", text)
		require.Equal(t, want, got)
	})
}
