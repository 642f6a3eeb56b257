package postgrestest

import "syscall"

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
