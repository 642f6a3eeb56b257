package rules

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// What takes the parser a time that is not in proportion to the length of the file.
const maxOpen = 1000

var manyEntries = regexp.MustCompile(`(?m)^[ \t]*(?:[-?:][ \t]+){32}`)

// parseYAML returns a YAML file as nodes. It reads one document without anchors, aliases, tags and merges, so that a
// short file is a short document.
func parseYAML(text []byte) (_ *node, err error) {
	open := 0
	for _, c := range text {
		switch c {
		case '[', '{':
			open++
		case ']', '}':
			open--
		}
		if open > maxOpen {
			return nil, fmt.Errorf("more than %d brackets are open at once", maxOpen)
		}
	}
	if manyEntries.Match(text) {
		return nil, fmt.Errorf("lists are nested more than %d deep", maxDepth)
	}
	defer func() {
		if p := recover(); p != nil { // a fault of the parser is a fault of the file
			err = errors.New("the file is not YAML that can be read; write it in a simpler way")
		}
	}()
	file, err := parser.ParseBytes(text, 0)
	if err != nil {
		return nil, yamlError(err)
	}
	var body ast.Node
	for _, document := range file.Docs {
		if document.Body == nil {
			continue
		}
		if body != nil {
			return nil, fmt.Errorf("line %d: a second document begins; write one", lineOf(document.Body))
		}
		body = document.Body
	}
	if body == nil {
		return nil, errors.New("the file is empty")
	}
	return yamlNode(body, 0)
}

// yamlError returns a parser's error in one line.
func yamlError(err error) error {
	var syntax yaml.Error
	if errors.As(err, &syntax) && syntax.GetToken() != nil && syntax.GetToken().Position != nil {
		return fmt.Errorf("line %d: %s", syntax.GetToken().Position.Line, syntax.GetMessage())
	}
	first, _, _ := strings.Cut(err.Error(), "\n")
	return errors.New(first)
}

func lineOf(n ast.Node) int {
	if t := n.GetToken(); t != nil && t.Position != nil {
		return t.Position.Line
	}
	return 0
}

// yamlNode returns a part of a file.
func yamlNode(from ast.Node, depth int) (*node, error) {
	if depth > maxDepth {
		return nil, tooDeep(lineOf(from))
	}
	n := &node{line: lineOf(from), kind: scalar}
	switch from := from.(type) {
	case *ast.NullNode:
		n.kind = nothing
	case *ast.StringNode:
		n.text = from.Value
		n.quoted = from.Token.Type == token.SingleQuoteType || from.Token.Type == token.DoubleQuoteType
	case *ast.LiteralNode:
		n.text, n.quoted = from.Value.Value, true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		n.text = from.GetToken().Value
	case *ast.SequenceNode:
		n.kind = list
		for _, value := range from.Values {
			item, err := yamlNode(value, depth+1)
			if err != nil {
				return nil, err
			}
			n.items = append(n.items, item)
		}
	case *ast.MappingNode:
		n.kind = object
		for _, value := range from.Values {
			if err := n.addYAML(value, depth+1); err != nil {
				return nil, err
			}
		}
	case *ast.MappingValueNode:
		n.kind = object
		return n, n.addYAML(from, depth+1)
	default:
		return nil, fmt.Errorf("line %d: anchors, aliases, tags and merges are not read; write out what they stand for", n.line)
	}
	return n, nil
}

// addYAML adds a field to an object.
func (n *node) addYAML(from *ast.MappingValueNode, depth int) error {
	key, err := yamlNode(from.Key, depth)
	if err != nil {
		return err
	}
	if key.kind != scalar {
		return fmt.Errorf("line %d: the name of a field is %s; use a word", key.line, key.kind)
	}
	value, err := yamlNode(from.Value, depth)
	if err != nil {
		return err
	}
	return n.addAt(key.line, key.text, value)
}
