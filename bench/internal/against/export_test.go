package against

import (
	"encoding/gob"
	"io"

	"github.com/pgratelimit/pgratelimit/bench/internal/contender"
)

// NewSide is the runner of a process, for the tests: over a pipe to this one.
func NewSide(in io.Writer, out io.Reader, closeIn func() error) contender.Runner {
	return &side{ask: gob.NewEncoder(in), answers: gob.NewDecoder(out), close: closeIn}
}

// Ready waits for a process's first answer.
func Ready(r contender.Runner) error {
	_, err := r.(*side).answer()
	return err
}
