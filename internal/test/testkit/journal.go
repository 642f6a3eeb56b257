package testkit

import (
	"bytes"
	"sync"
)

// Journal is a log that may be read while it is written. The zero Journal is empty and ready for use.
type Journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write appends to the log.
func (j *Journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

// String returns the text written so far.
func (j *Journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}
