//go:build unix && !linux

package postgrestest

func tmpfsHasRoom(string) bool { return false }
