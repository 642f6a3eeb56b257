package rules

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// parseYAML returns a YAML file as nodes. It reads one document without anchors, aliases, tags, merges and directives, so
// that a short file is a short document.
func parseYAML(text []byte) (_ *node, err error) {
	defer func() {
		if p := recover(); p != nil { // a fault of the parser is a fault of the file
			err = errors.New("the file is not YAML that can be read; write it in a simpler way")
		}
	}()
	if err := checkBlank(text); err != nil {
		return nil, err
	}
	tokens := lexer.Tokenize(string(text))
	for _, check := range []func(token.Tokens) error{checkTokens, checkEmpty} {
		if err := check(tokens); err != nil {
			return nil, err
		}
	}
	file, err := parser.Parse(tokens, 0)
	if err != nil {
		return nil, yamlError(err)
	}
	if len(file.Docs) != 1 || file.Docs[0].Body == nil {
		return nil, errors.New("the file is empty")
	}
	return yamlNode(file.Docs[0].Body, 0)
}

// checkTokens refuses what is not read, and that for which the parser takes more than its time: what is nested deeply, maps
// with many fields, and many documents.
func checkTokens(tokens token.Tokens) error {
	open, entries, line := 0, 0, 0 // entries are those of lists within lists, on one line
	fields := map[int]int{}        // of the maps that are open, by the columns of their names
	for i, t := range tokens {
		if t.Position.Line != line {
			entries, line = 0, t.Position.Line
		}
		switch t.Type {
		case token.AnchorType, token.AliasType, token.TagType, token.MergeKeyType, token.DirectiveType, token.MappingKeyType:
			return fmt.Errorf("line %d: anchors, aliases, tags, merges, directives and keys with a ? are not read; write out what they stand for", line)
		case token.DocumentHeaderType, token.DocumentEndType:
			if slices.ContainsFunc(tokens[:i], func(t *token.Token) bool { return t.Type != token.CommentType }) {
				return fmt.Errorf("line %d: the document ends here; write one in each file, without ... at its end", line)
			}
		case token.SequenceStartType, token.MappingStartType:
			open++
		case token.SequenceEndType, token.MappingEndType:
			open--
		case token.SequenceEntryType:
			entries++
			maps.DeleteFunc(fields, func(column, _ int) bool { return column > t.Position.Column })
		case token.MappingValueType:
			entries++
			if i > 0 && open == 0 {
				at := tokens[i-1].Position.Column
				maps.DeleteFunc(fields, func(column, _ int) bool { return column > at })
				fields[at]++
				if fields[at] > maxFields {
					return fmt.Errorf("line %d: the map has more than %d fields", line, maxFields)
				}
			}
		case token.CollectEntryType:
			entries = 0
		default: // words, and what stands for them
		}
		if max(open, entries, len(fields)) > maxDepth {
			return tooDeep(line)
		}
	}
	return nil
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
		return nil, fmt.Errorf("line %d: there is %s, which is not read", n.line, from.Type())
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
