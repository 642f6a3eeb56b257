package main

import (
	"archive/zip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// Where the packages that record are, for the build.
const (
	modulePath       = "github.com/pgratelimit/pgratelimit"
	traceDirectory   = "internal/walktrace"
	programDirectory = "internal/walkrun"
)

// core returns the directories whose files are counted.
func core() []string {
	return []string{"ratelimit", "internal/bucket", "internal/batch", "internal/store"}
}

// checkout returns the root of the module as it was at a revision, written below directory.
func checkout(ctx context.Context, root, revision, directory string) (_ string, err error) {
	archive, module := filepath.Join(directory, "module.zip"), filepath.Join(directory, "module")
	if _, err := output(exec.CommandContext(ctx, "git", "-C", root, "archive", "--format=zip", "-o", archive, revision)); err != nil {
		return "", err
	}
	files, err := zip.OpenReader(archive)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, files.Close()) }()
	return module, os.CopyFS(module, files)
}

// overlay returns a file for go build -overlay, with which the core of the module is instrumented and has the packages that
// record. It and what it names are written to directory; the module itself stays as it is.
func overlay(module, directory string) (string, error) {
	texts := map[string]string{
		filepath.Join(module, traceDirectory, "walktrace.go"): traceText,
		filepath.Join(module, programDirectory, "main.go"):    programText,
	}
	for _, part := range core() {
		files, err := filepath.Glob(filepath.Join(module, part, "*.go"))
		if err != nil {
			return "", err
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			source, err := os.ReadFile(file)
			if err != nil {
				return "", err
			}
			if texts[file], err = instrument(path.Join(part, filepath.Base(file)), string(source)); err != nil {
				return "", err
			}
		}
	}
	replaced := map[string]string{}
	for file, text := range texts {
		replaced[file] = filepath.Join(directory, fmt.Sprintf("%d.go", len(replaced)))
		if err := os.WriteFile(replaced[file], []byte(text), 0o600); err != nil {
			return "", err
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": replaced})
	if err != nil {
		return "", err
	}
	list := filepath.Join(directory, "overlay.json")
	return list, os.WriteFile(list, text, 0o600)
}

// instrument returns the source of the file called name with a call at the entry of each of its functions. Lines
// stay where they are.
func instrument(name, source string) (string, error) {
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, name, source, parser.SkipObjectResolution)
	if err != nil {
		return "", fmt.Errorf("instrument: %w", err)
	}
	text := source
	for _, declaration := range slices.Backward(file.Decls) {
		if f, ok := declaration.(*ast.FuncDecl); ok && f.Body != nil {
			text = insert(text, set.Position(f.Body.Lbrace).Offset+1, fmt.Sprintf(" walktrace.Enter(%q, %q);", name, nameOf(f)))
		}
	}
	if text == source { // it has no function
		return source, nil
	}
	return insert(text, set.Position(file.Name.End()).Offset, fmt.Sprintf("; import %q", modulePath+"/"+traceDirectory)), nil
}

func insert(text string, offset int, what string) string { return text[:offset] + what + text[offset:] }

// nameOf returns the name of a function, or Type.Name of a method.
func nameOf(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	receiver := f.Recv.List[0].Type
	for {
		switch t := receiver.(type) {
		case *ast.StarExpr:
			receiver = t.X
		case *ast.IndexExpr: // of a generic type
			receiver = t.X
		case *ast.IndexListExpr:
			receiver = t.X
		case *ast.Ident:
			return t.Name + "." + f.Name.Name
		default:
			return f.Name.Name
		}
	}
}

// traceText is the package that the instrumented functions call.
const traceText = `package walktrace

import "sync"

type Entry struct{ File, Function string }

var (
	mu      sync.Mutex
	on      bool
	entries []Entry
)

// Enter records that a function was entered, from whatever goroutine.
func Enter(file, function string) {
	mu.Lock()
	defer mu.Unlock()
	if on {
		entries = append(entries, Entry{file, function})
	}
}

// Record records the entries while call runs, and forgets those before.
func Record(call func()) {
	mu.Lock()
	on, entries = true, nil
	mu.Unlock()
	call()
	mu.Lock()
	on = false
	mu.Unlock()
}

// Entries returns what was recorded last.
func Entries() []Entry {
	mu.Lock()
	defer mu.Unlock()
	return entries
}
`

// programText is the program that makes the calls. It uses the public interface of the limiter alone, so that it can be
// built against earlier revisions.
const programText = `package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/walktrace"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	runs  = 6                     // the last one counts
	quiet = 50 * time.Millisecond // before each: what an earlier one left to other goroutines has ended
)

// scenario is a call, which records itself.
type scenario struct {
	name    string
	allowed bool
	call    func(ctx context.Context, l *ratelimit.Limiter, pool *pgxpool.Pool) (ratelimit.Decision, error)
}

type recording struct {
	Scenario string
	Entries  []walktrace.Entry
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	recordings, err := record(ctx, regexp.MustCompile(os.Args[1]))
	stop()
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(recordings)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func record(ctx context.Context, only *regexp.Regexp) (recordings []recording, err error) {
	server, err := postgrestest.Start(ctx, postgrestest.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	scratch, err := postgrestest.NewScratch(ctx, server.URL(), "walk", 4)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, scratch.Drop(ctx)) }()
	if err := migrations.Up(ctx, scratch.Pool, migrations.Config{}); err != nil {
		return nil, err
	}
	for _, s := range scenarios() {
		if !only.MatchString(s.name) {
			continue
		}
		entries, err := s.record(ctx, scratch.Pool)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		recordings = append(recordings, recording{s.name, entries})
	}
	return recordings, nil
}

// record makes the calls of a scenario, with a Limiter of its own, and returns the entries of the last.
func (s scenario) record(ctx context.Context, pool *pgxpool.Pool) (_ []walktrace.Entry, err error) {
	l, err := ratelimit.New(pool, ratelimit.Config{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.Close(context.WithoutCancel(ctx))) }()
	d, err := takeAlone(limits("first", 1, 1024))(ctx, l, pool) // the first call of a program stores the fingerprint of its secret
	if err != nil {
		return nil, err
	}
	for range runs {
		time.Sleep(quiet)
		if d, err = s.call(ctx, l, pool); err != nil {
			return nil, err
		}
	}
	if d.Allowed != s.allowed {
		return nil, fmt.Errorf("decided %+v", d)
	}
	return walktrace.Entries(), nil
}

func scenarios() []scenario {
	one, five, tight := limits("one", 1, 1024), limits("five", 5, 1024), limits("tight", 1, 1)
	return []scenario{
		{"tx-1", true, takeInTransaction(one)},
		{"take-1", true, takeAlone(one)},
		{"five", true, takeAlone(five)},
		{"tx-5", true, takeInTransaction(five)},
		{"refused-tx-1", false, takeInTransaction(tight)},
		{"reserve-settle", true, reserveAndSettle(one)},
		{"in-tx", true, inTx(one)},
	}
}

// limits returns so many limits that gain next to nothing while the program runs. A microsecond gains a power of two, so
// that no rounding, which depends on the clock, decides how many functions are entered.
func limits(name string, count int, capacity float64) (limits []ratelimit.Limit) {
	const period = 1 << 36 * time.Microsecond
	for i := range count {
		limits = append(limits, ratelimit.Define(fmt.Sprint(name, i), ratelimit.TokenBucket{Rate: 1, Period: period, Capacity: capacity}))
	}
	return limits
}

func requests(limits []ratelimit.Limit) (requests []ratelimit.Request) {
	for _, limit := range limits {
		requests = append(requests, limit.For("key"))
	}
	return requests
}

type call = func(ctx context.Context, l *ratelimit.Limiter, pool *pgxpool.Pool) (ratelimit.Decision, error)

func takeAlone(limits []ratelimit.Limit) call {
	return func(ctx context.Context, l *ratelimit.Limiter, _ *pgxpool.Pool) (d ratelimit.Decision, err error) {
		asked := requests(limits)
		walktrace.Record(func() { d, err = l.Take(ctx, asked...) })
		return d, err
	}
}

func takeInTransaction(limits []ratelimit.Limit) call {
	return func(ctx context.Context, l *ratelimit.Limiter, pool *pgxpool.Pool) (d ratelimit.Decision, err error) {
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
			bound, asked := l.WithTx(tx), requests(limits)
			walktrace.Record(func() { d, err = bound.Take(ctx, asked...) })
			return err
		})
		return d, err
	}
}

func inTx(limits []ratelimit.Limit) call {
	return func(ctx context.Context, l *ratelimit.Limiter, _ *pgxpool.Pool) (d ratelimit.Decision, err error) {
		asked := requests(limits)
		walktrace.Record(func() {
			err = l.InTx(ctx, func(tx pgx.Tx) (err error) {
				d, err = l.WithTx(tx).Take(ctx, asked...)
				return err
			})
		})
		return d, err
	}
}

func reserveAndSettle(limits []ratelimit.Limit) call {
	return func(ctx context.Context, l *ratelimit.Limiter, _ *pgxpool.Pool) (d ratelimit.Decision, err error) {
		walktrace.Record(func() {
			var r ratelimit.Reservation
			if r, err = l.Reserve(ctx, requests(limits)...); err == nil {
				d, err = r.Decision, l.Settle(ctx, r.ID, requests(limits)[0].Cost(0.5))
			}
		})
		return d, err
	}
}
`
