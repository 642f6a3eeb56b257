//go:build !generalpath

package store

// decidesInSQL is whether the statements that decide by themselves are used, for the policies that they know. It is a
// constant of the build: with the tag generalpath every call locks its rows, decides in Go, and saves them. The tests
// run with it too (make nightly JOBS=general), as all that is no token bucket and no fixed window is to go that way.
const decidesInSQL = true
