package ratelimit

import "github.com/pgratelimit/pgratelimit/internal/bucket"

// use is what a batcher knows of a bucket while a call waits for it, or a flight keeps it from others.
type use struct {
	key    bucket.Key
	calls  int     // that wait for it
	queued int     // those of them in the queue, and not behind a late flight
	flight *flight // that keeps it from others
}

// maxUnused bounds the uses that a batcher keeps for the next buckets.
const maxUnused = 1000

// use returns what is known of a bucket, which is nothing yet where nobody uses it.
func (b *batcher) use(key bucket.Key) *use {
	u := b.uses[key]
	if u != nil {
		return u
	}
	if n := len(b.unused); n > 0 {
		u, b.unused = b.unused[n-1], b.unused[:n-1]
	} else {
		u = &use{}
	}
	u.key = key
	b.uses[key] = u
	return u
}

// dropUnused forgets a bucket that nobody uses any more.
func (b *batcher) dropUnused(u *use) {
	if u.calls > 0 || u.flight != nil {
		return
	}
	delete(b.uses, u.key)
	if *u = (use{}); len(b.unused) < maxUnused {
		b.unused = append(b.unused, u)
	}
}

// addUses notes that c waits for its buckets. One that only looks waits for none.
func (b *batcher) addUses(c *call) {
	if c.look {
		return
	}
	c.uses = c.oneUse[:0]
	for i := range c.plan.buckets {
		u := b.use(c.plan.buckets[i].bucketKey())
		u.calls++
		c.uses = append(c.uses, u)
	}
}

// dropUses notes that c waits for its buckets no more.
func (b *batcher) dropUses(c *call) {
	for _, u := range c.uses {
		u.calls--
		b.dropUnused(u)
	}
	c.uses = nil
}

// inUse reports whether an earlier call, in the queue or in a flight that keeps its bucket from others, asks for a
// bucket of c.
func (c *call) inUse() bool { return c.isQueuedFor(nil) || c.keeper() != nil }

// isQueuedFor reports whether a call in the queue asks for a bucket of c, or only for one that f keeps.
func (c *call) isQueuedFor(f *flight) bool {
	for _, u := range c.uses {
		if u.queued > 0 && (f == nil || u.flight == f) {
			return true
		}
	}
	return false
}

// keeper returns a flight that keeps a bucket of c from others, a late one if there is one, or nil.
func (c *call) keeper() (keeper *flight) {
	for _, u := range c.uses {
		if f := u.flight; f != nil && (keeper == nil || f.late) {
			keeper = f
		}
	}
	return keeper
}

// keep keeps a bucket from others while the flight is out.
func (f *flight) keep(u *use) {
	if u.flight == f {
		return
	}
	if f.keeps == nil {
		f.keeps = f.oneKeep[:0]
	}
	u.flight = f
	f.keeps = append(f.keeps, u)
}

// letGo lets others have the buckets that the flight has kept from them.
func (b *batcher) letGo(f *flight) {
	for _, u := range f.keeps {
		u.flight = nil
		b.dropUnused(u)
	}
	f.keeps = nil
}
