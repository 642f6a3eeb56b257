package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/shirou/gopsutil/v4/cpu"
	"github.com/shirou/gopsutil/v4/disk"
	"github.com/shirou/gopsutil/v4/load"

	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// Machine is what the figures were measured on.
type Machine struct {
	CPU        string
	Cores      int
	Go         string
	Load       float64 // processes that ran or wanted to in the minute before the start
	FileSystem string
	Flush      time.Duration // median time of a write of a page and its flush to the disk; 0: not known
}

// Describe returns what this process runs on, and measures the disk that holds directory. It returns an error if that
// is memory, because nothing that is committed there is on disk.
func Describe(ctx context.Context, directory string) (Machine, error) {
	m := Machine{Cores: runtime.NumCPU(), Go: runtime.Version(), FileSystem: "unknown"}
	if usage, err := disk.UsageWithContext(ctx, directory); err == nil { // in a container it is not known
		m.FileSystem = usage.Fstype
	}
	if processors, err := cpu.InfoWithContext(ctx); err == nil && len(processors) > 0 {
		m.CPU = processors[0].ModelName
	}
	if average, err := load.AvgWithContext(ctx); err == nil {
		m.Load = average.Load1
	}
	if m.FileSystem == "tmpfs" || m.FileSystem == "ramfs" {
		return m, fmt.Errorf("the server's data would be in memory (%s); set TMPDIR to a directory on a disk", m.FileSystem)
	}
	var err error
	if m.Flush, err = flush(directory); err != nil && !errors.Is(err, os.ErrNotExist) {
		return m, err
	}
	return m, nil
}

// flush returns the median time of overwriting a page beside directory and flushing it, as a commit does.
func flush(directory string) (_ time.Duration, err error) {
	const pageBytes, times = 8192, 200
	file, err := os.CreateTemp(filepath.Dir(directory), "flush")
	if err != nil {
		return 0, fmt.Errorf("measure the disk: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close(), os.Remove(file.Name())) }()
	page := make([]byte, pageBytes)
	took := make([]time.Duration, times)
	for i := range took {
		began := time.Now()
		if _, err := file.WriteAt(page, 0); err != nil {
			return 0, fmt.Errorf("measure the disk: %w", err)
		}
		if err := file.Sync(); err != nil {
			return 0, fmt.Errorf("measure the disk: %w", err)
		}
		took[i] = time.Since(began)
	}
	slices.Sort(took)
	return stats.Percentile(took, 50), nil
}
