package store

import (
	"strconv"

	"github.com/jackc/pgx/v5/pgtype"
)

// array is the array parameter of a statement. For a plain slice pgx puts each element into an interface, which
// allocates; from this type it gets pointers. Without prepared statements, as in the modes exec and simple_protocol,
// pgx formats it as an array literal.
type array[E element] []E

// element is one of text, integer, bigint and double, which pgx knows by the methods that return values.
type element interface {
	appendTo(literal []byte) []byte
}

type (
	text    string
	integer int32
	bigint  int64
	double  float64
)

// Dimensions tells pgx how long the array is.
func (a array[E]) Dimensions() []pgtype.ArrayDimension {
	if a == nil {
		return nil
	}
	return []pgtype.ArrayDimension{{Length: int32(len(a)), LowerBound: 1}}
}

// Index returns a pointer to an element.
func (a array[E]) Index(i int) any { return &a[i] }

// IndexType returns what Index returns.
func (a array[E]) IndexType() any { return (*E)(nil) }

// TextValue returns the array as a literal.
func (a array[E]) TextValue() (pgtype.Text, error) {
	if a == nil {
		return pgtype.Text{}, nil
	}
	literal := []byte{'{'}
	for i, e := range a {
		if i > 0 {
			literal = append(literal, ',')
		}
		literal = e.appendTo(literal)
	}
	return pgtype.Text{String: string(append(literal, '}')), Valid: true}, nil
}

// TextValue is for pgx.
func (t *text) TextValue() (pgtype.Text, error) {
	return pgtype.Text{String: string(*t), Valid: true}, nil
}

// appendTo quotes the text, because its characters may be special in a literal.
func (t text) appendTo(literal []byte) []byte {
	literal = append(literal, '"')
	for i := range len(t) {
		if t[i] == '"' || t[i] == '\\' {
			literal = append(literal, '\\')
		}
		literal = append(literal, t[i])
	}
	return append(literal, '"')
}

// Int64Value is for pgx.
func (n *integer) Int64Value() (pgtype.Int8, error) {
	return pgtype.Int8{Int64: int64(*n), Valid: true}, nil
}

func (n integer) appendTo(literal []byte) []byte { return bigint(n).appendTo(literal) }

// Int64Value is for pgx.
func (n *bigint) Int64Value() (pgtype.Int8, error) {
	return pgtype.Int8{Int64: int64(*n), Valid: true}, nil
}

func (n bigint) appendTo(literal []byte) []byte { return strconv.AppendInt(literal, int64(n), 10) }

// Float64Value is for pgx.
func (n *double) Float64Value() (pgtype.Float8, error) {
	return pgtype.Float8{Float64: float64(*n), Valid: true}, nil
}

func (n double) appendTo(literal []byte) []byte {
	return strconv.AppendFloat(literal, float64(n), 'g', -1, 64)
}
