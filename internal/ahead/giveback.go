package ahead

import (
	"context"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

const (
	// sweeps is how often in a Prefetch one timer looks for tokens that are not used, from minSweep to maxSweep apart. They are
	// given back when none was used for idleSweeps of these.
	sweeps             = 8
	idleSweeps         = 2
	minSweep, maxSweep = 5 * time.Millisecond, time.Second
	// givingBack is how many statements give back at once.
	givingBack = 4
	// returnWait is how long a sweep waits for a locked row. It tries again a maxSweep later.
	returnWait = 50 * time.Millisecond
)

// leftover has the remaining tokens of a holding that was dropped.
type leftover struct {
	key   bucket.Key
	terms bucket.Terms
	kept  bucket.Ahead

	notBefore time.Duration // when a sweep retries after a lock timeout; 0: at once
}

// giveUp ends the holding, and returns its remaining tokens.
func (h *holding) giveUp() (all []leftover) {
	if h.kept.Left > 0 {
		all = append(all, leftover{key: h.key, terms: *h.terms, kept: h.kept})
	}
	h.kept = bucket.Ahead{}
	return all
}

// orphan has kept tokens given back later that were taken under these terms.
func (k *Keeper) orphan(of bucket.Key, t bucket.Terms, kept bucket.Ahead) {
	if kept.Left <= 0 {
		return
	}
	k.mu.Lock()
	k.orphans = append(k.orphans, leftover{key: of, terms: t, kept: kept})
	k.mu.Unlock()
	k.arm(t.Prefetch)
}

// start reports whether something may begin that Close is to wait for.
func (k *Keeper) start() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.idle != nil {
		return false
	}
	k.running++
	return true
}

// end ends what start began.
func (k *Keeper) end() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.running--
	if k.idle != nil && k.running == 0 {
		close(k.idle)
	}
}

// arm sees to it that tokens that are not used are given back, as long as there are holdings.
func (k *Keeper) arm(prefetch int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.idle != nil || k.timer != nil && k.shortest <= prefetch {
		return
	}
	if k.timer != nil {
		k.timer.Stop()
	}
	k.shortest = prefetch
	k.timer = time.AfterFunc(sweepEvery(prefetch), k.sweep)
}

func sweepEvery(prefetch int64) time.Duration {
	return min(max(time.Duration(prefetch)*time.Microsecond/sweeps, minSweep), maxSweep)
}

// sweep gives unused tokens back, and forgets holdings without tokens.
func (k *Keeper) sweep() {
	if !k.start() {
		return
	}
	defer k.end()
	left, shortest := k.dueOrphans()
	for i := range k.stripes {
		left = k.sweepStripe(&k.stripes[i], left, &shortest)
	}
	if shortest > 0 {
		k.arm(shortest) // before it gives back, which may take long
	}
	k.giveBack(context.Background(), left, returnWait)
}

// heldPrefetch is the Prefetch by which the next sweep is a maxSweep later.
const heldPrefetch = int64(sweeps * maxSweep / time.Microsecond)

// dueOrphans returns the orphans that it is time to give back, and the Prefetch by which the others are; 0 if there are none.
func (k *Keeper) dueOrphans() (due []leftover, shortest int64) {
	now := k.now()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.timer = nil
	later := k.orphans[:0:0]
	for _, one := range k.orphans {
		if one.notBefore > now {
			later = append(later, one)
			shortest = heldPrefetch
		} else {
			due = append(due, one)
		}
	}
	k.orphans = later
	return due, shortest
}

// retry has a later sweep give one back, because its row is locked.
func (k *Keeper) retry(one leftover) {
	one.notBefore = k.now() + maxSweep
	k.mu.Lock()
	k.orphans = append(k.orphans, one)
	k.mu.Unlock()
	k.arm(heldPrefetch)
}

func (k *Keeper) sweepStripe(s *stripe, left []leftover, shortest *int64) []leftover {
	now := k.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, h := range s.of {
		prefetch := time.Duration(h.terms.Prefetch) * time.Microsecond
		if !h.fetching {
			if h.isLeft(now, prefetch) {
				h.pace /= 2
				left = append(left, h.giveUp()...)
			}
			if h.kept.Left <= 0 && now-h.usedAt > 2*prefetch {
				delete(s.of, key)
				k.count.Add(-1)
				continue
			}
		}
		if *shortest == 0 || h.terms.Prefetch < *shortest {
			*shortest = h.terms.Prefetch
		}
	}
	return left
}

// isLeft reports whether to return the kept tokens. That is so if their time is over, if no call uses them, or if most of them are
// left after half of the time. The sooner, the more other processes can use.
func (h *holding) isLeft(now, prefetch time.Duration) bool {
	unused := h.kept.Left > h.kept.Taken-h.kept.Left
	return h.kept.Left > 0 && (now >= h.ends || now-h.usedAt >= prefetch*idleSweeps/sweeps || unused && now-h.sent >= prefetch/2)
}

// giveBack returns the unused tokens to the rows, as far as the promise allows. It waits for each row for at most most; then a
// later sweep retries. A most of 0 waits until ctx ends.
func (k *Keeper) giveBack(ctx context.Context, left []leftover, most time.Duration) {
	slots := k.slots // several sweeps may run
	if most == 0 {
		slots = make(chan struct{}, givingBack)
	}
	var workers sync.WaitGroup
	for i := range left {
		slots <- struct{}{}
		workers.Go(func() {
			defer func() { <-slots }()
			k.giveBackOne(ctx, &left[i], most)
		})
	}
	workers.Wait()
}

// giveBackOne gives one back. Tokens that could not be given back are lost, unless the row was locked for longer than most.
func (k *Keeper) giveBackOne(ctx context.Context, one *leftover, most time.Duration) {
	event := Event{Limit: one.key.Name, Lost: one.kept.Left}
	defer func() { k.tell(event) }()
	terms, kept := one.kept.Returning(one.terms)
	given, err := k.owner.GiveBack(ctx, one.key, terms, kept, most)
	switch {
	case most > 0 && store.IsLockTimeout(err):
		event.Lost = 0
		k.retry(*one)
	case err == nil:
		event.Returned, event.Lost = given, one.kept.Left-given
	}
}

// GiveUp gives back the kept tokens of the buckets that a call changes. In a transaction, which may hold their rows, it does so in the
// background.
func (k *Keeper) GiveUp(ctx context.Context, asks []bucket.Ask, inTx bool) {
	if k.IsEmpty() {
		return
	}
	var left []leftover
	for i := range asks {
		s := k.stripe(&asks[i].Key)
		s.mu.Lock()
		if h := s.of[asks[i].Key]; h != nil && !h.fetching {
			left = append(left, h.giveUp()...)
		}
		s.mu.Unlock()
	}
	if !inTx {
		k.giveBack(ctx, left, 0)
		return
	}
	for _, one := range left {
		k.orphan(one.key, one.terms, one.kept)
	}
}

// Shut has calls answered from memory no more.
func (k *Keeper) Shut() {
	if k != nil {
		k.shut.Store(true)
	}
}

// Close gives back all kept tokens, and waits for that, or until ctx ends. Shut and the end of the owner's fetches come before.
func (k *Keeper) Close(ctx context.Context) error {
	if k == nil {
		return nil
	}
	k.mu.Lock()
	if k.idle == nil {
		k.idle = make(chan struct{})
		if k.running == 0 {
			close(k.idle)
		}
	}
	if k.timer != nil {
		k.timer.Stop()
	}
	k.mu.Unlock()
	select {
	case <-k.idle: // also where ctx is over
	default:
		select {
		case <-k.idle:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	k.mu.Lock()
	left := k.orphans
	k.orphans = nil
	k.mu.Unlock()
	for i := range k.stripes {
		s := &k.stripes[i]
		s.mu.Lock()
		for _, h := range s.of {
			left = append(left, h.giveUp()...)
		}
		k.count.Add(-int64(len(s.of)))
		s.of = nil
		s.mu.Unlock()
	}
	if len(left) == 0 {
		return nil
	}
	k.giveBack(ctx, left, 0)
	return ctx.Err()
}
