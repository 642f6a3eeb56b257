package rules

import (
	"fmt"
	"slices"

	"github.com/goccy/go-yaml/token"
)

const (
	maxBlank = 100  // blank lines in a row: at the end of a text the lexer copies the text for each of them
	maxEmpty = 1000 // entries and fields without a value in a file: for each the parser copies all tokens that follow
)

// checkBlank returns an error for many blank lines in a row.
func checkBlank(text []byte) error {
	line, ends := 1, 1 // the ends of lines since the last character that is not white space
	for i, c := range text {
		switch {
		case c == '\r' && i+1 < len(text) && text[i+1] == '\n', c == ' ', c == '\t':
		case c == '\n' || c == '\r':
			line++
			if ends++; ends > maxBlank+1 {
				return fmt.Errorf("line %d: there are more than %d blank lines in a row; delete some", line, maxBlank)
			}
		default:
			ends = 0
		}
	}
	return nil
}

// checkEmpty returns an error for many entries and fields without a value.
func checkEmpty(tokens token.Tokens) error {
	tokens = slices.DeleteFunc(slices.Clone(tokens), func(t *token.Token) bool { return t.Type == token.CommentType })
	empty := 0
	var open []token.Type // the brackets and braces
	for i, t := range tokens {
		isEmpty := false
		switch t.Type {
		case token.SequenceEntryType, token.MappingValueType:
			isEmpty = lacksValue(tokens, i)
		case token.MappingStartType, token.SequenceStartType:
			open = append(open, t.Type)
		case token.CollectEntryType:
			isEmpty = len(open) > 0 && open[len(open)-1] == token.MappingStartType && isBareKey(tokens, i-1)
		case token.MappingEndType, token.SequenceEndType:
			isEmpty = t.Type == token.MappingEndType && isBareKey(tokens, i-1)
			open = open[:max(len(open)-1, 0)]
		default:
		}
		if isEmpty {
			empty++
		}
		if empty > maxEmpty {
			return fmt.Errorf("line %d: there are more than %d entries and fields without a value; leave them out", t.Position.Line, maxEmpty)
		}
	}
	return nil
}

// lacksValue reports whether nothing follows the dash or the colon at i that is its value.
func lacksValue(tokens token.Tokens, i int) bool {
	if i+1 == len(tokens) {
		return true
	}
	t, next := tokens[i], tokens[i+1]
	isField := t.Type == token.MappingValueType
	column := t.Position.Column
	if isField && i > 0 {
		column = tokens[i-1].Position.Column
	}
	switch {
	case next.Type == token.CollectEntryType || next.Type == token.MappingEndType || next.Type == token.SequenceEndType:
		return true
	case next.Position.Line == t.Position.Line:
		return false
	case isField && next.Type == token.SequenceEntryType: // a list may begin in the column of its name
		return next.Position.Column < column
	}
	return next.Position.Column <= column
}

// isBareKey reports whether the token at i is a key in braces without a colon.
func isBareKey(tokens token.Tokens, i int) bool {
	isStart := func(i int) bool {
		return i >= 0 && (tokens[i].Type == token.MappingStartType || tokens[i].Type == token.CollectEntryType)
	}
	return isStart(i-1) && !isStart(i)
}
