// Package strictjson decodes JSON objects strictly. An unknown field, a repeated field, and a value of another type are
// errors that name the field and say what to write.
package strictjson

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"
)

// Error is the error of one field.
type Error struct {
	Field   string // the name of the field
	Problem string // the fault, and the text to write instead
	Unknown bool   // whether there is no such field
}

// Error returns the name of the field and the problem.
func (e *Error) Error() string { return fmt.Sprintf("%q %s", e.Field, e.Problem) }

// Errorf returns the error of one field.
func Errorf(field, problem string, args ...any) error {
	return &Error{Field: field, Problem: fmt.Sprintf(problem, args...)}
}

// Object has the fields of a JSON object by their names.
type Object map[string]json.RawMessage

// Parse returns the fields of a JSON object, without null fields.
func Parse(data []byte) (Object, error) {
	if !utf8.Valid(data) {
		return nil, errors.New("it is not UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if open, err := d.Token(); err != nil || open != json.Delim('{') {
		return nil, cmp.Or(err, errors.New("it is not an object; write fields with their names"))
	}
	object, seen := Object{}, map[string]bool{}
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return nil, err
		}
		field, _ := name.(string)
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, err
		}
		if seen[field] {
			return nil, Errorf(field, "is given twice; keep one")
		}
		if seen[field] = true; string(value) != "null" {
			object[field] = value
		}
	}
	if _, err := d.Token(); err != nil {
		return nil, errors.New("the object does not end")
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("there is more after the object")
	}
	return object, nil
}

// Decode decodes all fields of the object into the struct that into points to. The argument what names the object in an
// error.
func (o Object) Decode(into any, what string) error {
	names, err := o.Take(into)
	if err != nil {
		return err
	}
	return o.end(names, what)
}

// Take decodes the fields that the struct has, and removes them from the object. It returns their names.
func (o Object) Take(into any) (names []string, err error) {
	v := reflect.ValueOf(into).Elem()
	for _, f := range reflect.VisibleFields(v.Type()) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" {
			continue
		}
		names = append(names, name)
		data, ok := o[name]
		if !ok {
			continue
		}
		delete(o, name)
		if err := decode(name, data, v.FieldByIndex(f.Index)); err != nil {
			return nil, err
		}
	}
	return names, nil
}

// end returns an error if fields are left.
func (o Object) end(known []string, what string) error {
	left := make([]string, 0, len(o))
	for field := range o {
		left = append(left, field)
	}
	if len(left) == 0 {
		return nil
	}
	return &Error{slices.Min(left), fmt.Sprintf("is no field of %s; there are %s", what, strings.Join(known, ", ")), true}
}

// decode decodes one field. A text may be a number or a word such as true, unless its type has a method UnmarshalJSON.
func decode(field string, data []byte, v reflect.Value) error {
	_, strict := v.Addr().Interface().(json.Unmarshaler)
	if !strict && v.Kind() == reflect.String && !bytes.ContainsAny(data, `"[{`) {
		v.SetString(string(data))
		return nil
	}
	err := json.Unmarshal(data, v.Addr().Interface())
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		names := map[reflect.Kind]string{
			reflect.String: "a text", reflect.Bool: "true or false", reflect.Int: "a whole number", reflect.Slice: "a list",
			reflect.Map: "fields with their names",
		}
		return Errorf(field, "is %.40s; write %s", data, cmp.Or(names[wrong.Type.Kind()], "a number"))
	}
	if inside, ok := errors.AsType[*Error](err); ok {
		return inside
	}
	if err != nil {
		return Errorf(field, "is %.40s; %v", data, err)
	}
	return nil
}

// Text is a text that is no number and no word such as true.
type Text string

// UnmarshalJSON returns an error for another value than a text in quotes.
func (t *Text) UnmarshalJSON(data []byte) error {
	if err := json.Unmarshal(data, (*string)(t)); err != nil {
		return errors.New("write a text in quotes")
	}
	return nil
}

// Positive is a number above 0. A missing field is 0, the default.
type Positive float64

// UnmarshalJSON returns an error for a number that is not above 0.
func (p *Positive) UnmarshalJSON(data []byte) error {
	if err := json.Unmarshal(data, (*float64)(p)); err != nil || !(*p > 0) {
		return errors.New("write a number above 0")
	}
	return nil
}
