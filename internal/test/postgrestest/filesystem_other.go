//go:build unix && !linux

package postgrestest

func mountMemory(string, int64, *account) error { return errNoMount }

func unmount(string) error { return nil }

func tmpfsHasRoom(string) bool { return false }
