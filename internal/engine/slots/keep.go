package slots

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Owner is who holds leases.
type Owner interface {
	Renew(ctx context.Context, id string) (Span, error)
	Release(ctx context.Context, id string) error
	// IsLost reports whether an error of Renew or Release says that the lease is lost.
	IsLost(err error) bool
	// Lost returns the error of a lease that could not be renewed, with the cause. A nil cause is a lease that has ended
	// meanwhile.
	Lost(cause error) error
}

// Span is how long a lease holds, on the clock of this process.
type Span struct {
	Asked  time.Time // the time of the request: the span had not begun before
	Length time.Duration
}

// leastRelease is the least time that a release may take.
const leastRelease = 10 * time.Second

// Keep renews a lease until release is called, which releases it. It calls lose with an error when the lease is lost,
// and with nil after release.
func Keep(ctx context.Context, owner Owner, id string, span Span, lose context.CancelCauseFunc) (release func()) {
	k := &keeper{owner: owner, id: id, lose: lose, stop: make(chan struct{}), done: make(chan struct{})}
	k.holds(span)
	background := context.WithoutCancel(ctx)
	release = sync.OnceFunc(func() { k.release(background) })
	if !time.Now().Before(k.end) {
		if err := k.renew(ctx); err != nil {
			if !k.gone {
				err = owner.Lost(err)
			}
			lose(err)
			close(k.done)
			return release
		}
	}
	k.expiry = time.AfterFunc(time.Until(k.end), func() { lose(owner.Lost(nil)) })
	go k.run(background)
	return release
}

// keeper renews one lease.
type keeper struct {
	owner  Owner
	id     string // of the lease
	lose   context.CancelCauseFunc
	expiry *time.Timer   // loses the lease at end; nil if it was lost from the beginning
	stop   chan struct{} // is closed when the work is done
	done   chan struct{} // is closed when no renewal is in progress any more

	// Of run, once that is running.
	length time.Duration // of the lease
	end    time.Time     // until when it holds on the clock of this process
	gone   bool          // the server said that it is lost
}

// holds notes how long the lease holds. The server decided between the request and the answer.
func (k *keeper) holds(span Span) { k.length, k.end = span.Length, span.Asked.Add(span.Length) }

// renew renews the lease. A panic of a hook of the program, such as a tracer of pgx, is an error: it must not end the
// process.
func (k *keeper) renew(ctx context.Context) (err error) {
	defer func() {
		if failure := recover(); failure != nil {
			err = fmt.Errorf("a hook panicked: %v", failure)
		}
	}()
	span, err := k.owner.Renew(ctx, k.id)
	if err != nil {
		k.gone = k.owner.IsLost(err)
		return err
	}
	k.holds(span)
	return nil
}

// run renews the lease each time a third of it is over, until the work is done or the lease is lost.
func (k *keeper) run(ctx context.Context) {
	defer close(k.done)
	for next := k.end.Add(-k.length * 2 / 3); ; {
		if !k.wait(time.Until(next)) || !time.Now().Before(k.end) {
			return
		}
		bounded, cancel := context.WithDeadline(ctx, k.end)
		err := k.renew(bounded)
		cancel()
		switch {
		case err == nil:
			if !k.expiry.Reset(time.Until(k.end)) { // it has been lost meanwhile
				k.expiry.Stop()
				return
			}
			next = k.end.Add(-k.length * 2 / 3)
		case k.gone:
			k.lose(err)
			return
		default:
			next = time.Now().Add(k.length / 12)
		}
	}
}

// wait waits for a span and reports whether the work still goes on.
func (k *keeper) wait(span time.Duration) bool {
	timer := time.NewTimer(span)
	defer timer.Stop()
	select {
	case <-k.stop:
		return false
	case <-timer.C:
	}
	select {
	case <-k.stop:
		return false
	default:
		return true
	}
}

// release ends the renewals, waits for a renewal in progress, because ending it would cost its connection, and releases
// the lease. It also releases a lease that ended by the clock of this process: the server may have renewed it, with a
// lost answer.
func (k *keeper) release(ctx context.Context) {
	defer k.lose(nil)
	close(k.stop)
	<-k.done
	if k.expiry != nil {
		k.expiry.Stop()
	}
	if !k.gone {
		bounded, cancel := context.WithTimeout(ctx, max(k.length, leastRelease)) // then the slots are free by themselves
		defer cancel()
		if err := k.owner.Release(bounded, k.id); k.owner.IsLost(err) {
			k.lose(err)
		} // the Observer has been told of any other
	}
}
