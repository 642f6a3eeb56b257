package recorded_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	histories         = uint64(subjects) * 8000
	postgresHistories = uint64(subjects) * 160 // that a server answers, too
	textHistories     = uint64(subjects) * 16  // whose texts are recorded
)

// hash is the first four bytes of the SHA-256 hash of a text.
type hash [4]byte

// vectors are what the histories answered when they were recorded. Each subject has files of its own.
type vectors struct {
	hashes []hash
	texts  []string // of the first histories
}

func vectorFile(about subject, name string) string {
	return filepath.Join("testdata", about.String()+name)
}

func newVectors() *vectors {
	return &vectors{hashes: make([]hash, histories), texts: make([]string, textHistories)}
}

// load reads the vectors. A history that is not recorded has the hash 0.
func load(t *testing.T) *vectors {
	t.Helper()
	v := newVectors()
	for about := range subjects {
		if !about.isFree() {
			v.loadSubject(t, about)
		}
	}
	return v
}

func (v *vectors) loadSubject(t *testing.T, about subject) {
	t.Helper()
	hashes, err := os.ReadFile(vectorFile(about, ".hashes"))
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	require.NoError(t, err)
	n := uint64(about)
	for one := range slices.Chunk(hashes, len(hash{})) {
		v.hashes[n] = hash(one)
		n += uint64(subjects)
	}
	packed, err := os.ReadFile(vectorFile(about, ".texts.gz"))
	require.NoError(t, err)
	reader, err := gzip.NewReader(bytes.NewReader(packed))
	require.NoError(t, err)
	texts, err := io.ReadAll(reader)
	require.NoError(t, err)
	n = uint64(about)
	for text := range strings.SplitSeq(string(texts), "\x00") {
		v.texts[n] = text
		n += uint64(subjects)
	}
}

// save records the answers of the histories about a subject.
func (v *vectors) save(t *testing.T, about subject) {
	t.Helper()
	var hashes []byte
	var texts []string
	for n := uint64(about); n < histories; n += uint64(subjects) {
		hashes = append(hashes, v.hashes[n][:]...)
		if n < textHistories {
			texts = append(texts, v.texts[n])
		}
	}
	require.NoError(t, os.WriteFile(vectorFile(about, ".hashes"), hashes, 0o600))
	var packed bytes.Buffer
	writer, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	require.NoError(t, err)
	_, err = io.WriteString(writer, strings.Join(texts, "\x00"))
	require.NoError(t, err)
	require.NoError(t, writer.Close())
	require.NoError(t, os.WriteFile(vectorFile(about, ".texts.gz"), packed.Bytes(), 0o600))
}

// difference counts the histories whose answers differ from the recorded ones.
type difference struct {
	ran       int
	differing [subjects]int
	first     [subjects][]uint64 // of these histories
	text      string             // of the first whose text is recorded
}

func (d *difference) add(r result, want hash) {
	if d.ran++; r.hash == want {
		return
	}
	about := subjectOf(r.n)
	d.differing[about]++
	d.first[about] = append(d.first[about], r.n)
	slices.Sort(d.first[about])
	d.first[about] = d.first[about][:min(len(d.first[about]), 5)]
}

// all returns how many histories differ.
func (d *difference) all() (sum int) {
	for _, n := range d.differing {
		sum += n
	}
	return sum
}

// String says how many histories about each subject differ, and how to read one.
func (d *difference) String() string {
	if d.all() == 0 {
		return fmt.Sprintf("all %d histories answer as recorded", d.ran)
	}
	text := fmt.Sprintf("%d of %d histories differ from the recorded ones:\n", d.all(), d.ran)
	for about := range subjects {
		if n := d.differing[about]; n > 0 {
			text += fmt.Sprintf("  %-10v %5d, such as %v\n", about, n, d.first[about])
		}
	}
	return text +
		"To read one, run this here and in a checkout of the commit before, and compare:\n" +
		"  go test ./integration_test/recorded -run 'TestRecorded$' -history N -v\n" +
		"If you want the change: integration_test/recorded/CHANGES.md says how to record the new answers.\n" + d.text
}

// explain returns the first line that differs, and the lines before it.
func explain(n uint64, want, got string) string {
	recorded, now := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range now {
		if i < len(recorded) && recorded[i] == now[i] {
			continue
		}
		before := strings.Join(now[max(0, i-12):i], "\n")
		was := "(nothing)"
		if i < len(recorded) {
			was = recorded[i]
		}
		return fmt.Sprintf("history %d, line %d:\n%s\n- %s\n+ %s\n", n, i+1, before, was, now[i])
	}
	return ""
}
