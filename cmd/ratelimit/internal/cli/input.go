package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/pgratelimit/pgratelimit/rules"
)

// standardInput names the standard input in place of a file.
const standardInput = "-"

// fileName returns the name of an input file for messages.
func fileName(path string) string {
	if path == standardInput {
		return "standard input"
	}
	return path
}

// readRules returns what a rules file says, or standard input.
func (a *app) readRules(ctx context.Context, path string) (*rules.Document, error) {
	if path != standardInput {
		return rules.ReadFile(path)
	}
	document, err := rules.Read(endsWith(ctx, a.in))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", fileName(path), err)
	}
	return document, nil
}

// endsWith returns a reader of the same that ends with the context, so that an interrupt ends a command which waits for
// input.
func endsWith(ctx context.Context, r io.Reader) io.Reader {
	from, to := io.Pipe()
	context.AfterFunc(ctx, func() { to.CloseWithError(ctx.Err()) })
	go func() { // it ends with the process, when nothing comes
		_, err := io.Copy(to, r)
		to.CloseWithError(err)
	}()
	return from
}
