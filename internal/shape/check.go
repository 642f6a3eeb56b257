package main

import (
	"archive/zip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const shownItems = 20 // of a number that rose

// check prints the numbers above their budget with their new items, and returns an error if there are any.
func check(ctx context.Context, w io.Writer, o options, b budget, n numbers) error {
	if b == nil {
		return fmt.Errorf("there is no %s; to write it, run make shape UPDATE=1", o.budget)
	}
	above := b.risen(n)
	if len(above) == 0 {
		return nil
	}
	before, revision, err := earlier(ctx, o)
	if err != nil {
		fmt.Fprintf(w, "The lists show old and new together, because the earlier revision cannot be read: %v\n", err)
	}
	for _, of := range above {
		fmt.Fprintf(w, "%s is %s; its budget is %s\n", of.name, format(of.value), format(b[of.name]))
		added := of.items
		if old := before[of.name]; old != nil {
			added = addedTo(old.items, of.items)
		}
		for i, it := range added {
			if i == shownItems {
				fmt.Fprintf(w, "    and %d more; to list all: go run ./internal/shape -v '^%s$'\n", len(added)-i, of.name)
				break
			}
			fmt.Fprintf(w, "    %s\n", it)
		}
		if strings.HasPrefix(of.name, walkPrefix) {
			fmt.Fprintln(w, "    to list the files: cd bench && go run ./walk -v")
		}
	}
	if before != nil {
		fmt.Fprintf(w, "The lists show only what is new since %s.\n", revision)
	}
	return fmt.Errorf("%d of %d numbers are above the budget; make them smaller, or edit %s and give the reason in the commit", len(above), len(n), o.budget)
}

// earlier returns the numbers of the revision to compare with, without walks.
func earlier(ctx context.Context, o options) (_ numbers, revision string, err error) {
	revision = o.against
	if revision == "" {
		if revision, err = git(ctx, o.dir, "log", "-1", "--format=%h", "--", ".ci/shape.txt"); err != nil {
			return nil, "", err
		}
		if revision == "" {
			return nil, "", errors.New("no commit has the budget")
		}
	}
	directory, err := os.MkdirTemp("", "shape")
	if err != nil {
		return nil, "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(directory)) }()
	archive, module := filepath.Join(directory, "module.zip"), filepath.Join(directory, "module")
	if _, err := git(ctx, o.dir, "archive", "--format=zip", "-o", archive, revision); err != nil {
		return nil, "", err
	}
	files, err := zip.OpenReader(archive)
	if err != nil {
		return nil, "", err
	}
	defer func() { err = errors.Join(err, files.Close()) }()
	if err := os.CopyFS(module, files); err != nil {
		return nil, "", err
	}
	t, err := readTree(module)
	if err != nil {
		return nil, "", err
	}
	return measure(t), revision, nil
}

func git(ctx context.Context, dir string, args ...string) (string, error) {
	c := exec.CommandContext(ctx, "git", append([]string{"-C", dir}, args...)...)
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w", args[0], err)
	}
	return strings.TrimSpace(string(out)), nil
}

// addedTo returns the items of now that are not in old. A moved line is not new. The size of a file that grew is the difference.
func addedTo(old, now []item) (added []item) {
	type key struct{ file, text string }
	left := map[key]int{}
	for _, i := range old {
		left[key{i.file, i.text}] += i.size
	}
	for _, i := range now {
		k := key{i.file, i.text}
		if before := min(left[k], i.size); before > 0 {
			left[k] -= before
			i.size -= before
		}
		if i.size > 0 {
			added = append(added, i)
		}
	}
	return added
}
