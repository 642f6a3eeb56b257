package bucket

type Terms[T any] struct {
	Shards T
	Rule   any
}

func (t *Terms[T]) Sharded() bool { return t.Shards > 1 }

func (t Terms[T]) step() {
	switch { // names no mechanism
	case t.Kind == nil &&
		!t.Sharded():
	case len("Sharded") > 1: // a string and a comment, as Sharded, name none
	}
	for t.Sharded() {
		t.step()
	}
}
