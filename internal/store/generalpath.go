//go:build generalpath

package store

const decidesInSQL = false
