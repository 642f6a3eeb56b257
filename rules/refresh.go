package rules

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

const (
	// firstPause is how long Run waits after the first failure, and twice as long after each more that follows soon, up to
	// lastPause or Config.Poll.
	firstPause = 100 * time.Millisecond
	lastPause  = 10 * time.Second
	// versionTimeout bounds the question for the version, and so how long a connection that is dead without saying so
	// keeps the news away.
	versionTimeout = 5 * time.Second
)

// Run keeps the Set up to date until ctx ends; call it in a goroutine of its own. It listens on one connection, which
// it reconnects if it's lost, and polls the version every Config.Poll. If a load fails, the Set doesn't change. It
// returns nil when ctx has ended, or an error that wraps ErrInvalidConfig.
func (s *Set) Run(ctx context.Context) error {
	if err := s.check(ctx, "run"); err != nil {
		return err
	}
	pause := firstPause
	for {
		began := time.Now()
		var err error
		if s.config.NoListen {
			err = s.poll(ctx)
		} else if err = s.listen(ctx); ctx.Err() == nil {
			s.reload(ctx) // it may be only the listening that does not work
		}
		if ctx.Err() != nil {
			return nil //nolint:nilerr // err is that ctx has ended
		}
		if err == nil || time.Since(began) > lastPause {
			pause = firstPause
		}
		if err := wait(ctx, pause/2+rand.N(pause/2)); err != nil {
			return nil //nolint:nilerr // ctx has ended
		}
		pause = min(2*pause, lastPause, max(s.config.Poll, firstPause))
	}
}

// listen waits for news on a connection of its own, until that fails.
func (s *Set) listen(ctx context.Context) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	if _, err := conn.Exec(ctx, "LISTEN "+pgx.Identifier{channelOf(s.config.Schema)}.Sanitize()); err != nil {
		return err
	}
	for {
		if err := s.refresh(ctx, conn); err != nil {
			return err
		}
		if err := s.await(ctx, conn); err != nil {
			return err
		}
	}
}

// connect makes the connection that is listened on.
func (s *Set) connect(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	if s.config.Connect != nil {
		return s.config.Connect(ctx)
	}
	config := s.pool.Config()
	if config.BeforeConnect != nil {
		if err := config.BeforeConnect(ctx, config.ConnConfig); err != nil {
			return nil, err
		}
	}
	config.ConnConfig.OnNotification = nil // the program's handler is for its own notifications
	conn, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	if err != nil {
		return nil, err
	}
	if config.AfterConnect != nil {
		if err := config.AfterConnect(ctx, conn); err != nil {
			_ = conn.Close(context.WithoutCancel(ctx))
			return nil, err
		}
	}
	return conn, nil
}

// await waits for a notification, or until the next poll. It ignores the payload: the caller asks for the version.
func (s *Set) await(ctx context.Context, conn *pgx.Conn) error {
	waiting, cancel := context.WithTimeout(ctx, s.untilNext())
	defer cancel()
	_, err := conn.WaitForNotification(waiting)
	if err != nil && ctx.Err() == nil && pgconn.Timeout(err) && !conn.IsClosed() {
		return nil
	}
	return err
}

// poll asks for news on connections of the pool, until that fails.
func (s *Set) poll(ctx context.Context) error {
	for {
		if err := s.refresh(ctx, s.pool); err != nil {
			return err
		}
		if err := wait(ctx, s.untilNext()); err != nil {
			return err
		}
	}
}

// untilNext returns how long it is until the tables are looked at next: Config.Poll and a little chance, or less if the
// loaded rules are out of date before.
func (s *Set) untilNext() time.Duration {
	next := s.config.Poll - rand.N(s.config.Poll/8+1)
	if current := s.current.Load(); current != nil && current.wake != maxInstant {
		next = min(next, max(time.Until(time.UnixMicro(current.wake).Add(-s.Ahead())), time.Millisecond))
	}
	return next
}

// source is a pool or a connection.
type source interface {
	beginner
	rower
}

// reload is refresh over the pool, without an error.
func (s *Set) reload(ctx context.Context) { _ = s.refresh(ctx, s.pool) }

// refresh loads the table if it is newer than the loaded version, or if the loaded rules are out of date.
func (s *Set) refresh(ctx context.Context, db source) error {
	current := s.current.Load()
	if current == nil || !time.Now().Add(s.Ahead()).Before(time.UnixMicro(current.wake)) {
		return s.load(ctx, db)
	}
	asked := time.Now()
	asking, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	version, _, ahead, err := s.sql.askVersion(asking, db)
	if err != nil {
		if db == source(s.pool) {
			s.tell(ctx, event.RulesLoaded{
				Version: current.version, Elapsed: time.Since(asked),
				Err: explain(err, s.config.Schema),
			})
		}
		return err
	}
	if version != current.version {
		return s.load(ctx, db)
	}
	current.ahead.Store(int64(ahead))
	s.sure.Store(&asked)
	s.tell(ctx, event.RulesChecked{Version: version})
	return nil
}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
