package batch

import "github.com/pgratelimit/pgratelimit/internal/bucket"

// use is what a Batcher knows of a bucket while a call waits for it, or a batch keeps it from others.
type use[T any] struct {
	key    bucket.Key
	calls  int       // that wait for it
	queued int       // those of them in the queue, and not behind a slow batch
	batch  *batch[T] // that keeps it from others
}

// maxUnused bounds the uses that a Batcher keeps for the next buckets.
const maxUnused = 1000

// use returns what is known of a bucket, which is nothing yet where nobody uses it.
func (b *Batcher[T]) use(key bucket.Key) *use[T] {
	u := b.uses[key]
	if u != nil {
		return u
	}
	if n := len(b.unused); n > 0 {
		u, b.unused = b.unused[n-1], b.unused[:n-1]
	} else {
		u = &use[T]{}
	}
	u.key = key
	b.uses[key] = u
	return u
}

// dropUnused forgets a bucket that nobody uses any more.
func (b *Batcher[T]) dropUnused(u *use[T]) {
	if u.calls > 0 || u.batch != nil {
		return
	}
	delete(b.uses, u.key)
	if *u = (use[T]{}); len(b.unused) < maxUnused {
		b.unused = append(b.unused, u)
	}
}

// addUses notes that c waits for its buckets.
func (b *Batcher[T]) addUses(c *Call[T]) {
	for i := range c.needs {
		u := b.use(c.needs[i].key)
		u.calls++
		c.needs[i].use = u
	}
}

// dropUses notes that c waits for its buckets no more.
func (b *Batcher[T]) dropUses(c *Call[T]) {
	for _, n := range c.needs {
		n.use.calls--
		b.dropUnused(n.use)
	}
	c.needs = nil
}

// inUse reports whether an earlier call, in the queue or in a batch that keeps its bucket from others, asks for a
// bucket of c.
func (c *Call[T]) inUse() bool { return c.isQueuedFor(nil) || c.keeper() != nil }

// isQueuedFor reports whether a call in the queue asks for a bucket of c, or only for one that f keeps.
func (c *Call[T]) isQueuedFor(f *batch[T]) bool {
	for _, n := range c.needs {
		if n.use.queued > 0 && (f == nil || n.use.batch == f) {
			return true
		}
	}
	return false
}

// keeper returns a batch that keeps a bucket of c from others, a slow one if there is one, or nil.
func (c *Call[T]) keeper() (keeper *batch[T]) {
	for _, n := range c.needs {
		if f := n.use.batch; f != nil && (keeper == nil || f.slow) {
			keeper = f
		}
	}
	return keeper
}

// keep keeps a bucket from others while the batch is in flight.
func (f *batch[T]) keep(u *use[T]) {
	if u.batch == f {
		return
	}
	if f.keeps == nil {
		f.keeps = f.oneKeep[:0]
	}
	u.batch = f
	f.keeps = append(f.keeps, u)
}

// letGo lets others have the buckets that the batch has kept from them.
func (b *Batcher[T]) letGo(f *batch[T]) {
	for _, u := range f.keeps {
		u.batch = nil
		b.dropUnused(u)
	}
	f.keeps = nil
}
