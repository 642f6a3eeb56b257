package rules

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// nodeKind is what a node is.
type nodeKind string

const (
	nothing nodeKind = "null"
	scalar  nodeKind = "a word or a number"
	list    nodeKind = "a list"
	object  nodeKind = "a map"
)

// node is a part of a file, whatever language that is in.
type node struct {
	kind   nodeKind
	line   int
	text   string // of a scalar
	quoted bool   // whether a scalar is a string for sure
	items  []*node
	fields []field // in their order
}

// field is one of the fields of an object.
type field struct {
	name  string
	line  int
	value *node
}

// add adds a field to an object.
func (n *node) add(f field) error {
	for _, other := range n.fields {
		if other.name == f.name {
			return fmt.Errorf("line %d: the field %q is on line %d already; keep one", f.line, f.name, other.line)
		}
	}
	n.fields = append(n.fields, f)
	return nil
}

const (
	maxDepth  = 32
	maxFields = 64 // of an object, which is compared with each other
)

// parse returns a file as nodes.
func parse(text []byte) (*node, error) {
	if start := bytes.TrimLeft(text, " \t\r\n"); len(start) > 0 && (start[0] == '{' || start[0] == '[') && json.Valid(text) {
		return parseJSON(text)
	}
	return parseYAML(text)
}

// jsonParser reads JSON that is known to be valid.
type jsonParser struct {
	text    []byte
	decoder *json.Decoder
	line    int
	counted int // the bytes whose lines are counted
}

func parseJSON(text []byte) (*node, error) {
	p := &jsonParser{text: text, decoder: json.NewDecoder(bytes.NewReader(text)), line: 1}
	p.decoder.UseNumber()
	return p.value(0)
}

// next returns the next token, and its line.
func (p *jsonParser) next() (json.Token, int, error) {
	token, err := p.decoder.Token()
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	end := int(p.decoder.InputOffset())
	p.line += bytes.Count(p.text[p.counted:end], []byte("\n"))
	p.counted = end
	return token, p.line, err
}

// value returns the next value.
func (p *jsonParser) value(depth int) (*node, error) {
	token, line, err := p.next()
	if err != nil {
		return nil, err
	}
	if depth > maxDepth {
		return nil, tooDeep(line)
	}
	n := &node{line: line, kind: scalar}
	switch t := token.(type) {
	case nil:
		n.kind = nothing
	case string:
		n.text, n.quoted = t, true
	case json.Number:
		n.text = t.String()
	case bool:
		n.text = fmt.Sprint(t)
	case json.Delim:
		return n, p.inside(n, t, depth+1)
	}
	return n, nil
}

// inside reads what is in a list or an object, and its end.
func (p *jsonParser) inside(n *node, opened json.Delim, depth int) error {
	n.kind = list
	if opened == '{' {
		n.kind = object
	}
	for p.decoder.More() {
		if n.kind == list {
			item, err := p.value(depth)
			if err != nil {
				return err
			}
			n.items = append(n.items, item)
			continue
		}
		name, line, err := p.next()
		if err != nil {
			return err
		}
		value, err := p.value(depth)
		if err != nil {
			return err
		}
		if err := n.addAt(line, fmt.Sprint(name), value); err != nil {
			return err
		}
	}
	_, _, err := p.next()
	return err
}

// addAt adds a field to an object that may grow too large.
func (n *node) addAt(line int, name string, value *node) error {
	if len(n.fields) == maxFields {
		return fmt.Errorf("line %d: the map has more than %d fields", line, maxFields)
	}
	return n.add(field{name, line, value})
}

func tooDeep(line int) error {
	return fmt.Errorf("line %d: it is nested more than %d deep", line, maxDepth)
}
