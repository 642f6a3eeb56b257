package telemetry

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

const (
	firstPause = time.Second // between the first two lines about failures of a kind
	lastPause  = time.Minute // it doubles up to this

	// calm is the time without a failure after which a success is a recovery. Without it, a database that fails every
	// other call would have two lines for each of them.
	calm = 5 * time.Second
)

// FailureLog writes about failures that may come with every call. A failure of a new kind is written immediately, later
// ones at growing intervals, with the number of those left out. When calls work again, one line says so. The zero
// FailureLog is ready for use. It is safe for concurrent use.
type FailureLog struct {
	// Now is the clock. Defaults to time.Now.
	Now func() time.Time

	failing atomic.Bool // whether kinds has any

	mu    sync.Mutex
	kinds map[kind]*sequence // few: messages and error types are constants
	began time.Time          // of the first failure since the last recovery
	last  time.Time          // of the last failure
}

type kind struct{ message, errorType string }

// sequence is the failures of a kind since the last recovery.
type sequence struct {
	next    time.Time // of the next line
	pause   time.Duration
	omitted int // since the last line
}

// Failed writes message with the attributes, the type and the text of err, and the number of failures left out before.
func (l *FailureLog) Failed(
	ctx context.Context, logger *slog.Logger, level slog.Level, message string, err error, attrs ...slog.Attr,
) {
	errorType := ErrorType(err)
	omitted, isDue := l.Due(message, errorType)
	if !isDue {
		return
	}
	attrs = append(attrs, slog.String("error_type", errorType), slog.String("error", ErrorText(err)),
		slog.Int("omitted", omitted))
	logger.LogAttrs(ctx, level, message, attrs...)
}

// Due counts a failure, and reports whether to write a line about it, and how many failures of its kind were left out
// before.
func (l *FailureLog) Due(message, errorType string) (omitted int, isDue bool) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.kinds == nil {
		l.kinds, l.began = make(map[kind]*sequence), now
	}
	l.last = now
	l.failing.Store(true)
	of := l.kinds[kind{message, errorType}]
	switch {
	case of == nil:
		of = &sequence{pause: firstPause}
		l.kinds[kind{message, errorType}] = of
	case now.Before(of.next):
		of.omitted++
		return 0, false
	default:
		of.pause = min(2*of.pause, lastPause)
	}
	omitted, of.omitted = of.omitted, 0
	of.next = now.Add(of.pause)
	return omitted, true
}

// Worked notes that a call worked. If calls failed, and none has for a few seconds, it writes message with the time for
// which they failed, and the number of failures left out since the last lines.
func (l *FailureLog) Worked(ctx context.Context, logger *slog.Logger, message string) {
	if !l.failing.Load() {
		return
	}
	if failed, omitted, hasRecovered := l.recovered(); hasRecovered {
		logger.LogAttrs(ctx, slog.LevelInfo, message, slog.Float64("failed_s", failed.Seconds()),
			slog.Int("omitted", omitted))
	}
}

func (l *FailureLog) recovered() (failed time.Duration, omitted int, hasRecovered bool) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.kinds == nil || now.Sub(l.last) < calm {
		return 0, 0, false
	}
	for _, of := range l.kinds {
		omitted += of.omitted
	}
	l.kinds = nil
	l.failing.Store(false)
	return l.last.Sub(l.began), omitted, true
}

func (l *FailureLog) now() time.Time {
	if l.Now != nil {
		return l.Now()
	}
	return time.Now()
}
