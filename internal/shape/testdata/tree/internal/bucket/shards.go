package bucket

func alone(t *Terms[int]) bool { return t.Sharded() || t.Kind == nil }
