//go:build generalpath

package ratelimit

const decidesInSQL = false
