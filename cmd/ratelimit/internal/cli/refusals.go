package cli

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/simulate"
)

// refusalFile is the file that --refusals names. Its old content is overwritten at the first refusal or at the end, so
// a replay that cannot begin leaves it unchanged.
type refusalFile struct {
	*os.File
	encoder *json.Encoder
	begun   bool
}

// openRefusals opens a file for writing, unless the replay reads it too.
func openRefusals(path string, read []string) (*refusalFile, error) {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o666)
	if err != nil {
		return nil, err
	}
	own, err := file.Stat()
	for _, other := range read {
		if info, errOther := os.Stat(other); err == nil && errOther == nil && info.Mode().IsRegular() &&
			os.SameFile(own, info) {
			err = fmt.Errorf("%s is read, too; name another file", path)
		}
	}
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	encoder := json.NewEncoder(file)
	encoder.SetEscapeHTML(false)
	return &refusalFile{File: file, encoder: encoder}, nil
}

// begin empties the file, once. A pipe or a terminal has nothing to be emptied.
func (f *refusalFile) begin() error {
	if f.begun {
		return nil
	}
	f.begun = true
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return err
	}
	return f.Truncate(0)
}

// write writes a refusal as a line.
func (f *refusalFile) write(r simulate.Refusal) error {
	if err := f.begin(); err != nil {
		return err
	}
	return f.encoder.Encode(r)
}
