package httplimit

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"reflect"
	"strings"
)

// writer notes the status of a response. It passes everything on, and has Flush and Hijack exactly if the writer below
// has them, perhaps by Unwrap.
type writer struct {
	http.ResponseWriter

	response *response
	single   []string // fields of which the response has one value: see Headers.single
}

// flusher and hijacker add the methods that handlers look for, and flushingHijacker both.
type (
	flusher          struct{ *writer }
	hijacker         struct{ *writer }
	flushingHijacker struct {
		*writer
		flusher
		hijacker
	}
)

// watch returns w with a note in response of each status that is sent. The response has the first value of each single
// field only: a reverse proxy adds the values of its upstream behind the middleware's.
func watch(w http.ResponseWriter, response *response, single []string) http.ResponseWriter {
	watched := &writer{w, response, single}
	flushes := reaches[http.Flusher](w) || reaches[interface{ FlushError() error }](w)
	hijacks := reaches[http.Hijacker](w)
	switch {
	case flushes && hijacks:
		return &flushingHijacker{watched, flusher{watched}, hijacker{watched}}
	case flushes:
		return &flusher{watched}
	case hijacks:
		return &hijacker{watched}
	}
	return watched
}

// maxUnwraps bounds the search in a chain of writers, which could be a circle.
const maxUnwraps = 100

// reaches reports whether an http.ResponseController finds the method of T in w.
func reaches[T any](w http.ResponseWriter) bool {
	for range maxUnwraps {
		if _, has := w.(T); has {
			return true
		}
		unwraps, more := w.(interface{ Unwrap() http.ResponseWriter })
		if !more {
			return false
		}
		w = unwraps.Unwrap()
	}
	return false
}

// answersByItself reports whether net/http sends 200 if a handler returns without a status. Writers of others may be of
// a framework that sends the status of an error later.
func answersByItself(w http.ResponseWriter) bool {
	if own, is := w.(interface{ answersByItself() bool }); is {
		return own.answersByItself()
	}
	of := reflect.TypeOf(w)
	if of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	path := of.PkgPath()
	return path == "net/http" || strings.HasPrefix(path, "net/http/") || path == "golang.org/x/net/http2"
}

func (w *writer) answersByItself() bool { return answersByItself(w.ResponseWriter) }

// Unwrap returns the writer below, for http.ResponseController: deadlines, and EnableFullDuplex.
func (w *writer) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// replace drops the values of single fields that a handler has added.
func (w *writer) replace() {
	for _, name := range w.single {
		if values := w.Header()[name]; len(values) > 1 {
			w.Header()[name] = values[:1]
		}
	}
}

func (w *writer) WriteHeader(status int) {
	w.replace()
	w.ResponseWriter.WriteHeader(status)
	w.response.send(status)
}

func (w *writer) Write(b []byte) (int, error) {
	w.replace()
	n, err := w.ResponseWriter.Write(b)
	w.wrote(int64(n), err == nil)
	return n, err
}

// WriteString implements io.StringWriter.
func (w *writer) WriteString(text string) (int, error) {
	w.replace()
	n, err := io.WriteString(w.ResponseWriter, text)
	w.wrote(int64(n), err == nil)
	return n, err
}

// ReadFrom implements io.ReaderFrom, so that io.Copy can use sendfile.
func (w *writer) ReadFrom(src io.Reader) (int64, error) {
	w.replace()
	n, err := io.Copy(w.ResponseWriter, src)
	w.wrote(n, false) // of an empty src nothing is sent
	return n, err
}

// wrote notes the status that the first bytes of a body send.
func (w *writer) wrote(n int64, sent bool) {
	if n > 0 || sent {
		w.response.send(http.StatusOK)
	}
}

// CloseNotify implements http.CloseNotifier, which the Stream of Gin needs.
func (w *writer) CloseNotify() <-chan bool {
	gone := make(chan bool, 1)
	context.AfterFunc(w.response.request.Context(), func() { gone <- true })
	return gone
}

// Flush implements http.Flusher.
func (w flusher) Flush() { _ = w.FlushError() }

// FlushError is what http.ResponseController calls.
func (w flusher) FlushError() error {
	w.replace()
	err := http.NewResponseController(w.ResponseWriter).Flush()
	if err == nil {
		w.response.send(http.StatusOK)
	}
	return err
}

// Hijack implements http.Hijacker.
func (w hijacker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	connection, buffered, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err == nil {
		w.response.send(http.StatusSwitchingProtocols)
	}
	return connection, buffered, err
}
