// Package cli is the command ratelimit, without its process: arguments, streams and variables come in, an exit code goes
// out.
//
// A command is a file, or a few: what it asks of the other packages, and how it shows the answer. What they share is in
// database.go, policy.go (which policy a bucket is asked under), output.go and exit.go.
package cli
