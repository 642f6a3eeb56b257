package simulate

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
)

const (
	maxLine    = 4 << 20  // the maximum length of a line; a longer line counts as unreadable
	readBuffer = 64 << 10 // of each source, because all are open at the same time
	sameBegin  = 4 << 10  // two sources that begin with the same bytes are copies, if the bytes are as many
)

// Source is a log. If its content is compressed with gzip, it is decompressed.
type Source struct {
	// Name is the name of the source in errors, such as the path of a file.
	Name string
	// Open opens the source.
	Open func() (io.ReadCloser, error)

	info os.FileInfo // of a file
}

// File returns the file at path as a source, or an error if it does not exist.
func File(path string) (Source, error) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return Source{}, fmt.Errorf("simulate: %w", err)
	case info.IsDir():
		return Source{}, fmt.Errorf("simulate: %s is a directory; name the files in it", path)
	}
	return Source{Name: path, Open: func() (io.ReadCloser, error) { return os.Open(path) }, info: info}, nil
}

// Reader returns r as a source, such as standard input. It does not close r.
func Reader(name string, r io.Reader) Source {
	return Source{Name: name, Open: func() (io.ReadCloser, error) { return io.NopCloser(r), nil }}
}

// lines reads a source line by line.
type lines struct {
	stored io.ReadCloser
	text   *bufio.Reader
	number int64  // the number of the last line, from 1 on
	long   []byte // a line that is longer than the buffer of text
}

// open opens a source.
func (s *Source) open() (*lines, error) {
	stored, err := s.Open()
	if err != nil {
		return nil, fmt.Errorf("simulate: %w", err)
	}
	l := &lines{stored: stored, text: bufio.NewReaderSize(stored, readBuffer)}
	if magic, err := l.text.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		unzipped, err := gzip.NewReader(l.text)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("simulate: %s: %w", s.Name, err), stored.Close())
		}
		l.text = bufio.NewReaderSize(unzipped, readBuffer)
	}
	if mark, err := l.text.Peek(3); err == nil && string(mark) == "\xef\xbb\xbf" { // the byte order mark
		_, _ = l.text.Discard(len(mark))
	}
	return l, nil
}

// errTooLong is returned for a line that is longer than maxLine, which is skipped.
var errTooLong = fmt.Errorf("the line has more than %d bytes", maxLine)

// next returns the next line without its end, valid until the next call. At the end of the source it returns io.EOF.
func (l *lines) next() (line []byte, err error) {
	l.number++
	line, err = l.text.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		l.long = l.long[:0]
		for errors.Is(err, bufio.ErrBufferFull) {
			l.long = append(l.long, line[:min(len(line), maxLine+1-len(l.long))]...)
			line, err = l.text.ReadSlice('\n')
		}
		if line = append(l.long, line...); len(line) > maxLine && (err == nil || errors.Is(err, io.EOF)) {
			return nil, errTooLong
		}
	}
	if errors.Is(err, io.EOF) && len(line) > 0 {
		err = nil // the last line may have no end
	}
	return bytes.TrimRight(line, "\r\n"), err
}

func (l *lines) close() error { return l.stored.Close() }
