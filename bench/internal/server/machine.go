package server

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// Describe returns what this process runs on, with the load before the start. It returns an error if the data in
// directory are in memory, because nothing that is committed there is on disk.
func Describe(directory string) (string, error) {
	took, err := flush(directory)
	switch {
	case err != nil:
		return "", err
	case took < 5*time.Microsecond:
		return "", fmt.Errorf("a flush of %s takes %v, so it's in memory; set TMPDIR to a directory on a disk", directory, took)
	}
	load, _, _ := strings.Cut(read("/proc/loadavg"), " ")
	_, processor, _ := strings.Cut(read("/proc/cpuinfo"), "model name\t: ")
	processor, _, _ = strings.Cut(processor, "\n")
	return fmt.Sprintf("%s, %d cores, %s, load %s, a page is flushed in %v", processor, runtime.NumCPU(),
		runtime.Version(), load, took.Round(time.Microsecond)), nil
}

// read returns a file, or "" on systems without it.
func read(file string) string {
	text, _ := os.ReadFile(file)
	return string(text)
}

// flush returns the median time of overwriting a page beside directory and flushing it, as a commit does.
func flush(directory string) (time.Duration, error) {
	const pageBytes, times = 8192, 200
	file, err := os.CreateTemp(filepath.Dir(directory), "flush")
	if err != nil {
		return 0, fmt.Errorf("measure the disk: %w", err)
	}
	defer func() { _, _ = file.Close(), os.Remove(file.Name()) }()
	page, took := make([]byte, pageBytes), make([]time.Duration, times)
	for i := range took {
		began := time.Now()
		_, err := file.WriteAt(page, 0)
		if err == nil {
			err = file.Sync()
		}
		if err != nil {
			return 0, fmt.Errorf("measure the disk: %w", err)
		}
		took[i] = time.Since(began)
	}
	slices.Sort(took)
	return stats.Percentile(took, 50), nil
}
