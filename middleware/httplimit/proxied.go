package httplimit

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
)

// maxWatched bounds the requests that are watched, because each costs a copy, and the Keys of a program don't change.
const maxWatched = 1000

// proxied finds out whether the key of a forwarded request is its peer. Then all clients of a proxy share a bucket.
type proxied struct {
	watched atomic.Int64
	log     sync.Once
}

type watchedKey struct{}

// watched returns r, and for a forwarded request one by which Peer finds m.
func (m *middleware) watched(r *http.Request) *http.Request {
	isForwarded := len(r.Header["X-Forwarded-For"]) > 0 || len(r.Header["Forwarded"]) > 0
	if !isForwarded || m.proxied.watched.Load() >= maxWatched {
		return r
	}
	m.proxied.watched.Add(1)
	return r.WithContext(context.WithValue(r.Context(), watchedKey{}, m))
}

// peerIsKey logs, once for each middleware, that the key of a forwarded request is its peer.
func peerIsKey(r *http.Request) {
	m, isWatched := r.Context().Value(watchedKey{}).(*middleware)
	if !isWatched {
		return
	}
	m.proxied.log.Do(func() {
		m.proxied.watched.Store(maxWatched)
		m.config.Logger.WarnContext(r.Context(), "a forwarded request has the key of its peer; if the peer is a proxy, all "+
			"its clients "+
			"share a bucket: use XForwardedFor or TrustedHeader in place of Peer", "route", m.config.Route)
	})
}
