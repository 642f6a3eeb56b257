package ratelimit

func alone(t struct {
	Sharded func() bool
	Kind    any
}) bool {
	return t.Sharded() || t.Kind == nil
}
