//go:build !generalpath

package integration_test

// generalPath is whether every call locks its rows, decides in Go, and saves them.
const generalPath = false
