package postgrestest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// mountMemory mounts an in-memory file system of that size at dir, for user. The file "mounted" in it says so to the
// watchdog.
func mountMemory(dir string, bytes int64, user *account) error {
	owner := ""
	if user != nil {
		owner = fmt.Sprintf(",uid=%d,gid=%d", user.uid, user.gid)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=700%s", bytes, owner)); err != nil {
		return fmt.Errorf("%w: mount at %s: %w", errNoMount, dir, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "mounted"), nil, 0o600); err != nil {
		return errors.Join(err, unmount(dir))
	}
	return nil
}

// unmount takes away what mountMemory mounted at dir, if it did.
func unmount(dir string) error {
	if err := syscall.Unmount(dir, 0); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.EPERM) {
		return fmt.Errorf("unmount %s: %w", dir, err)
	}
	return nil
}

// tmpfsHasRoom reports whether dir is on a tmpfs with room for a server's data and log: containers often have one of 64
// MB only.
func tmpfsHasRoom(dir string) bool {
	const tmpfsMagic, room = 0x01021994, 1 << 30
	var stat syscall.Statfs_t
	if err := syscall.Statfs(dir, &stat); err != nil {
		return false
	}
	return int64(stat.Type) == tmpfsMagic && stat.Bavail*uint64(stat.Bsize) >= room //nolint:unconvert // Type is int32 on some machines
}
