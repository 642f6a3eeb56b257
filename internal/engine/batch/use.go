package batch

import "github.com/pgratelimit/pgratelimit/internal/engine/bucket"

// use is what a Batcher knows of a bucket while a call waits for it, or a batch keeps it from others.
type use[T any] struct {
	key    bucket.Key
	calls  int       // that wait for it
	queued int       // how many of them are in the queue, and not behind a slow batch
	batch  *batch[T] // that keeps it from others
}

// maxUnused bounds the uses that a Batcher keeps for the next buckets.
const maxUnused = 1000

// use returns the record of a bucket. It makes a new one if no call uses the bucket.
func (b *Batcher[T]) use(key bucket.Key) *use[T] {
	if u := b.latest; u != nil && u.key == key { // as mostly if many calls are for one bucket
		return u
	}
	u := b.uses[key]
	if u != nil {
		b.latest = u
		return u
	}
	if n := len(b.unused); n > 0 {
		u, b.unused = b.unused[n-1], b.unused[:n-1]
	} else {
		u = &use[T]{}
	}
	u.key = key
	b.uses[key], b.latest = u, u
	return u
}

// dropUnused forgets a bucket that no call uses any more.
func (b *Batcher[T]) dropUnused(u *use[T]) {
	if u.calls > 0 || u.batch != nil {
		return
	}
	delete(b.uses, u.key)
	if b.latest == u {
		b.latest = nil
	}
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

// count adds a call to the queue's counts, or takes it out with n = -1.
func (b *Batcher[T]) count(c *Call[T], n int) {
	b.queued += n
	for i := range c.needs {
		c.needs[i].use.queued += n
	}
}

// inUse reports whether an earlier call, in the queue or in a batch that keeps its bucket from others, asks for a
// bucket of c.
func (c *Call[T]) inUse() bool { return c.isQueuedFor(nil) || c.keeper() != nil }

// isQueuedFor reports whether a call in the queue asks for a bucket of c. When f is not nil, only the buckets that f
// keeps count.
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
