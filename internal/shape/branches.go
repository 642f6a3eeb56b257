package main

import (
	"go/ast"
	"go/token"
	"path"
	"regexp"
	"slices"
	"strings"
)

// A mechanism is a feature of the core. It has files of its own; a condition anywhere else that names it is a branch
// that leaks.
type mechanism struct {
	name  string
	own   []string // patterns of paths
	names *regexp.Regexp
}

// mechanisms returns the mechanisms of the core, with the identifiers that conditions name them by. A word is a whole
// identifier.
func mechanisms() []mechanism {
	return []mechanism{
		{
			"transaction", nil, // whose transaction a call runs in
			words(`alone|callersTx|ownTx|hasTx|isLate`, `\b(l|limiter)\.pool [!=]= nil`),
		},
		{
			"shards",
			[]string{"ratelimit/shards.go"},
			words(`[sS]harded|[sS]hards|together`),
		},
		{
			"kinds",
			[]string{
				"internal/bucket/steps.go", "internal/bucket/windows.go", "internal/bucket/concurrent.go",
				"internal/bucket/sliding.go",
				"internal/store/parts.go", "ratelimit/concurrency.go", "ratelimit/hold.go", "ratelimit/lease.go",
				"ratelimit/slidingwindow.go", // and the package internal/slots
			},
			words(`slides|isOdd|isWindow|(All|Any)Steps|(Any)?Holds|lastFence|SlidingWindow|Concurrency|FixedWindow|TokenBucket`,
				`\.Kind [!=]= `, `\.Kind\.\(`, `\bStatement\b`, `\bg(roup\))?\.isPlain\b`),
		},
		{
			"eras",
			[]string{"internal/bucket/eras.go"},
			words(`(Any)?Eras?|(Any|is|err)?Outside|settle|PhaseByKey|IsSeeded|(Has|Any)Span`),
		},
		{
			"rules",
			[]string{"ratelimit/resolve.go", "ratelimit/rule.go"},
			words(`ruled|isRuledAs|isPaused|paused|[pP]ausedUntil|notBefore|released|On|Off|Shadow|Unenforced`,
				`\bplan\.isPlain\b`),
		},
		{
			"memory",
			[]string{"internal/store/engine.go"},
			words(`memory|inMemory`),
		},
		{
			"asked", nil, // the form of a call: a check, or one that takes nothing
			words(`Look|costless|AllCostless`),
		},
		{
			"routed",
			nil,
			words(`IsRouted|IsDistributed|LearnLayout|LeavesOutHeld|layoutRouted`),
		},
		{
			"clocks", []string{"internal/store/wait.go"}, // rows with a future timestamp, stale answers, held rows
			words(`FromFuture|isHeld`, `&held\b`),
		},
		{
			"calendars",
			[]string{
				"internal/bucket/windows.go", "ratelimit/calendarwindow.go",
			},
			words(`Calendar|[cC]alendars|calendar|CalendarWindow|Windows`),
		},
		{
			"refusalcache",
			nil, // internal/refusalcache is its package
			words(`cache|fromRefusals`),
		},
		{
			"gate",
			nil, // internal/gate is its package: fingerprint, pooler mode, read-only server
			words(`fingerprint|agreed|gate|leaving`),
		},
	}
}

// words returns a pattern that matches one of the identifiers, or one of the other patterns.
func words(identifiers string, others ...string) *regexp.Regexp {
	return regexp.MustCompile(strings.Join(append([]string{`\b(` + identifiers + `)\b`}, others...), "|"))
}

// countBranches counts the conditions of a file of the core that name a mechanism whose file it is not. A condition
// that names several mechanisms counts once for each.
func countBranches(n numbers, t *tree, f *file) {
	list := conditions(t, f)
	for _, m := range mechanisms() {
		if slices.ContainsFunc(m.own, func(pattern string) bool { ok, _ := path.Match(pattern, f.path); return ok }) {
			continue
		}
		for _, c := range list {
			if m.names.MatchString(withoutStrings(c.text)) {
				i := item{file: f.path, line: c.line, text: c.text, size: 1}
				n.add("branches/"+m.name, i)
				n.add("core/branches", i)
			}
		}
	}
}

// A condition is the head of an if, for, switch or case, or another expression that compares, negates or joins
// conditions.
type condition struct {
	line int
	text string // on one line, without comments
}

// conditions returns the conditions of a file. The parts of a condition are not conditions of their own.
func conditions(t *tree, f *file) (list []condition) {
	var end token.Pos // of the last condition
	add := func(from, to token.Pos) {
		if from < end {
			return
		}
		end = to
		list = append(list, condition{t.line(from), oneLine(f.text[t.set.Position(from).Offset:t.set.Position(to).Offset])})
	}
	ast.Inspect(f.ast, func(node ast.Node) bool {
		switch s := node.(type) {
		case *ast.IfStmt:
			add(s.If, s.Body.Lbrace)
		case *ast.ForStmt:
			add(s.For, s.Body.Lbrace)
		case *ast.RangeStmt:
			add(s.For, s.Body.Lbrace)
		case *ast.SwitchStmt:
			add(s.Switch, s.Body.Lbrace)
		case *ast.TypeSwitchStmt:
			add(s.Switch, s.Body.Lbrace)
		case *ast.CaseClause:
			add(s.Case, s.Colon)
		case *ast.BinaryExpr:
			if isLogical(s.Op) {
				add(s.Pos(), s.End())
			}
		case *ast.UnaryExpr:
			if s.Op == token.NOT {
				add(s.Pos(), s.End())
			}
		}
		return true
	})
	return list
}

func isLogical(operator token.Token) bool {
	switch operator {
	case token.LAND, token.LOR, token.EQL, token.NEQ, token.LSS, token.LEQ, token.GTR, token.GEQ:
		return true
	default:
		return false
	}
}

// oneLine returns source without its comments and line breaks.
func oneLine(source string) string {
	lines := strings.Split(source, "\n")
	for i, line := range lines {
		if at := strings.Index(line, "//"); at >= 0 && !strings.Contains(line[:at], `"`) {
			line = line[:at]
		}
		lines[i] = strings.TrimSpace(line)
	}
	return strings.TrimSpace(strings.Join(lines, " "))
}

var quoted = regexp.MustCompile("\"(\\\\.|[^\"\\\\])*\"|`[^`]*`")

// withoutStrings returns a condition with its strings emptied: a message names no mechanism.
func withoutStrings(text string) string { return quoted.ReplaceAllString(text, `""`) }
