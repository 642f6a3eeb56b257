package recorded_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	histories         = 100_000
	postgresHistories = 2000 // that a server answers, too
	textHistories     = 200  // whose texts are recorded
)

// hash is the first four bytes of the SHA-256 hash of a text.
type hash [4]byte

// vectors are what the histories answered when they were recorded.
type vectors struct {
	memory   []hash
	postgres map[uint64]hash // of histories that a server answers differently from memory
	texts    []string        // of the first histories
}

func vectorFile(name string) string { return filepath.Join("testdata", name) }

// newVectors returns vectors with room for all histories.
func newVectors() *vectors {
	return &vectors{memory: make([]hash, histories), postgres: make(map[uint64]hash), texts: make([]string, textHistories)}
}

// load reads the vectors. After a constant was raised there are fewer, until -update records the others.
func load(t *testing.T) *vectors {
	t.Helper()
	v := &vectors{postgres: make(map[uint64]hash)}
	hashes, err := os.ReadFile(vectorFile("memory.hashes"))
	require.NoError(t, err)
	for one := range slices.Chunk(hashes, len(hash{})) {
		v.memory = append(v.memory, hash(one))
	}
	lines, err := os.ReadFile(vectorFile("postgres.txt"))
	require.NoError(t, err)
	for scan := bufio.NewScanner(bytes.NewReader(lines)); scan.Scan(); {
		var n uint64
		var digits string
		_, err := fmt.Sscan(scan.Text(), &n, &digits)
		require.NoError(t, err)
		bits, err := hex.DecodeString(digits)
		require.NoError(t, err)
		v.postgres[n] = hash(bits)
	}
	packed, err := os.ReadFile(vectorFile("texts.gz"))
	require.NoError(t, err)
	reader, err := gzip.NewReader(bytes.NewReader(packed))
	require.NoError(t, err)
	texts, err := io.ReadAll(reader)
	require.NoError(t, err)
	v.texts = strings.Split(string(texts), "\x00")
	return v
}

// onServer returns the answers that a server must give: the answers in memory, or for some histories those in testdata/postgres.txt.
func (v *vectors) onServer(r result) hash {
	if own, differs := v.postgres[r.n]; differs && r.hash != v.memory[r.n] {
		return own
	}
	return v.memory[r.n]
}

// saveMemory records what memory answered.
func (v *vectors) saveMemory(t *testing.T) {
	t.Helper()
	var hashes []byte
	for _, h := range v.memory {
		hashes = append(hashes, h[:]...)
	}
	require.NoError(t, os.WriteFile(vectorFile("memory.hashes"), hashes, 0o600))
	var packed bytes.Buffer
	writer, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	require.NoError(t, err)
	_, err = io.WriteString(writer, strings.Join(v.texts, "\x00"))
	require.NoError(t, err)
	require.NoError(t, writer.Close())
	require.NoError(t, os.WriteFile(vectorFile("texts.gz"), packed.Bytes(), 0o600))
}

// savePostgres records what a server answered otherwise than memory.
func (v *vectors) savePostgres(t *testing.T) {
	t.Helper()
	var lines strings.Builder
	for _, n := range slices.Sorted(maps.Keys(v.postgres)) {
		own := v.postgres[n]
		fmt.Fprintf(&lines, "%d %s\n", n, hex.EncodeToString(own[:]))
	}
	require.NoError(t, os.WriteFile(vectorFile("postgres.txt"), []byte(lines.String()), 0o600))
}

// difference counts the histories whose answers differ from the recorded ones.
type difference struct {
	ran, differing int
	first          []uint64 // of these histories
	text           string   // of the first whose text is recorded
}

func (d *difference) add(r result, want hash) {
	if d.ran++; r.hash == want {
		return
	}
	d.differing++
	d.first = append(d.first, r.n)
	slices.Sort(d.first)
	d.first = d.first[:min(len(d.first), 10)]
}

// String says how many histories differ, and how to read one.
func (d *difference) String() string {
	if d.differing == 0 {
		return fmt.Sprintf("all %d histories answer as recorded", d.ran)
	}
	return fmt.Sprintf("%d of %d histories differ from the recorded ones: %v ...\n", d.differing, d.ran, d.first) +
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
