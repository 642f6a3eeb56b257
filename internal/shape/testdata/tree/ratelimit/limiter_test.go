package ratelimit

func Tested(l *Limiter) bool { return l.pool == nil }

func (l *Limiter) Tested() {}
