package golden_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/golden"
)

// failing is a testing.TB that records whether it failed.
type failing struct {
	testing.TB
	failed bool
}

func (f *failing) Helper()               {}
func (f *failing) Errorf(string, ...any) { f.failed = true }
func (f *failing) FailNow()              { panic(f) }

// fails reports whether check fails.
func fails(t *testing.T, check func(t testing.TB)) (failed bool) {
	t.Helper()
	f := &failing{TB: t}
	defer func() {
		if reason := recover(); reason != nil {
			require.Equal(t, any(f), reason)
		}
		failed = f.failed
	}()
	check(f)
	return f.failed
}

func TestGolden(t *testing.T) {
	if golden.Updating() {
		t.Skip("-update writes the files that must differ")
	}
	t.Chdir(t.TempDir())
	require.NoError(t, os.MkdirAll(filepath.Join("testdata", "help"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join("testdata", "help", "a.txt"), []byte("one\n"), 0o600))

	for text, want := range map[string]bool{"one\n": false, "One\n": true, "one": true, "": true} {
		require.Equal(t, want, fails(t, func(t testing.TB) { golden.Equal(t, "help/a.txt", text) }), "%q", text)
	}
	require.True(t, fails(t, func(t testing.TB) { golden.Equal(t, "help/b.txt", "") }), "there is no file")

	require.False(t, fails(t, func(t testing.TB) { golden.Directory(t, "help", map[string]string{"a.txt": "one\n"}) }))
	require.True(t, fails(t, func(t testing.TB) { golden.Directory(t, "help", map[string]string{"a.txt": "two\n"}) }))
	require.True(t, fails(t, func(t testing.TB) { golden.Directory(t, "help", map[string]string{"a.txt": "one\n", "b.txt": ""}) }))
	require.True(t, fails(t, func(t testing.TB) { golden.Directory(t, "help", map[string]string{}) }), "no text belongs to a.txt")
}
