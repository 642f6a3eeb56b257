package simulate

import (
	"errors"
	"io"
)

// Source is a log. What is compressed with gzip is read as what it holds, whatever its name is.
type Source struct {
	// Name is how the source is told of, such as a file's path.
	Name string
	// Size is how many bytes there are; 0: it is not known.
	Size int64
	// Open opens the source when it is its turn.
	Open func() (io.ReadCloser, error)
}

// File returns the source that is the file at path. It returns an error when there is no such file.
func File(path string) (Source, error) { return Source{}, errors.New("simulate: not yet") }

// Reader returns the source that is read from r, such as standard input. It does not close r.
func Reader(name string, r io.Reader) Source { return Source{} }

// DefaultFields returns the names under which an attribute is looked for in JSON, the first that is there.
func DefaultFields(attribute string) []string { return nil }
