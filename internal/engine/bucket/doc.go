// Package bucket is the algebra of rate limits. It computes the tokens in the rows of a bucket at an instant, the
// tokens left after a call, and the wait of a refused call. Values go in and values come out. The package knows no
// limit, no request, no context and no database, so that every store of rows can decide with it.
//
// The statements of package ratelimit compute the same, and both have to agree to the last bit. So the numbers are
// float64 here and double precision there, and each expression has the same operations in the same order. A conversion
// to float64 keeps the compiler from fusing two operations, because Postgres does not.
package bucket
