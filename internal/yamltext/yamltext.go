// Package yamltext writes JSON as YAML that people read.
package yamltext

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// FromJSON returns a JSON document as YAML, with its fields in the same order.
func FromJSON(data []byte) ([]byte, error) {
	var file yaml.Node
	if err := yaml.Unmarshal(escaped(data), &file); err != nil { // JSON is YAML
		return nil, err
	}
	unquote(&file)
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	err := errors.Join(encoder.Encode(&file), encoder.Close())
	return out.Bytes(), err
}

// escaped escapes the characters that JSON can have as they are, and YAML cannot.
func escaped(data []byte) []byte {
	out := make([]byte, 0, len(data))
	for _, r := range string(data) {
		if r == 0x7f || r >= 0x80 && r < 0xa0 || r == 0xfeff || r == 0xfffe || r == 0xffff {
			out = fmt.Appendf(out, `\u%04x`, r)
			continue
		}
		out = utf8.AppendRune(out, r)
	}
	return out
}

// unquote lets the encoder choose how to write each part. A text with a tab keeps its quotes, because the encoder would
// write "\t\n" as a block that no reader accepts. "<<" is an instruction without them.
func unquote(n *yaml.Node) {
	if n.Kind != yaml.ScalarNode || n.Value != "<<" && !strings.Contains(n.Value, "\t") {
		n.Style = 0
	}
	for _, inside := range n.Content {
		unquote(inside)
	}
}
