// Package cli is the command ratelimit without its process: it takes arguments, streams and environment variables, and
// returns an exit code.
//
// Each command has a file or a few, which call the other packages and print the result. Commands share database.go,
// policy.go (which finds the policy of a bucket), output.go and exit.go.
package cli
