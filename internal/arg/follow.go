package arg

import "context"

type followKey struct{}

// FollowRules returns a context for the calls of guards and workers: a stored rule decides whether a limit has slots or
// tokens, not the definition in the code.
func FollowRules(ctx context.Context) context.Context {
	return context.WithValue(ctx, followKey{}, true)
}

// FollowsRules reports whether ctx is from FollowRules, or derived from such a context.
func FollowsRules(ctx context.Context) bool { return ctx.Value(followKey{}) != nil }
