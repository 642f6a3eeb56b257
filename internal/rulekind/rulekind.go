// Package rulekind marks the calls of guards and workers. For these a stored rule decides whether a limit has slots or
// tokens, not the definition in the code.
package rulekind

import "context"

type contextKey struct{}

// Follow returns a context whose calls of Acquire take tokens of a limit that is defined with slots, if a rule says so.
func Follow(ctx context.Context) context.Context { return context.WithValue(ctx, contextKey{}, true) }

// IsFollowed reports whether the context is from Follow, or derived from such a context.
func IsFollowed(ctx context.Context) bool { return ctx.Value(contextKey{}) != nil }
