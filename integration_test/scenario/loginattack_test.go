package scenario_test

import (
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// attackTable is what TestLoginAttack prints.
const attackTable = `   who tries what                                   at tries checked admitted refused  by               retry after
1  200 guesses at ada's password at once            0s   200       5        0     195  account          3m
2  ada, who knows it, meanwhile                     0s     1       0        0       1  account, locked  3m
3  ada, a second before Retry-After is over      2m59s     1       0        0       1  account          1s
4  ada, when it is over                             3m     1       1        1       0
5  40 guesses at grace's, one every 45 s            3m    40      13        0      27  account, locked  15m15s
6  alan, who mistypes twice                     32m15s     2       2        0       0
7  alan, who then gets it right                 32m15s     1       1        1       0
8  a wrong password for ada, and for nobody     32m15s     2       2        0       0
9  one password tried on 40 accounts at once  1h32m15s    40      30        0      10  client           30s
`

// act is a part of the attack: attempts at once, or with a pause before each but the first.
type act struct {
	title    string
	after    time.Duration // since the act before
	attempts []attempt
	pause    time.Duration // -1: at once
}

const atOnce = -1

func acts() []act {
	times := func(n int, a attempt) (attempts []attempt) { return slices.Repeat([]attempt{a}, n) }
	right := func(login string) []attempt { return []attempt{{login, passwordOf(login), here}} }
	wrong := func(login string) attempt { return attempt{login, guess, here} }
	var spray []attempt
	for i := range 40 {
		spray = append(spray, wrong(fmt.Sprintf("user%02d", i)))
	}
	return []act{
		{title: "200 guesses at ada's password at once", attempts: times(200, wrong("ada")), pause: atOnce},
		{title: "ada, who knows it, meanwhile", attempts: right("ada")},
		{title: "ada, a second before Retry-After is over", after: 3*time.Minute - time.Second, attempts: right("ada")},
		{title: "ada, when it is over", after: time.Second, attempts: right("ada")},
		{title: "40 guesses at grace's, one every 45 s", attempts: times(40, wrong("grace")), pause: 45 * time.Second},
		{title: "alan, who mistypes twice", attempts: []attempt{{"alan", "alan has a long", here}, {"alan", "alan has a ling password", here}}},
		{title: "alan, who then gets it right", attempts: right("alan")},
		{title: "a wrong password for ada, and for nobody", attempts: []attempt{wrong("ada"), wrong("nobody")}},
		{title: "one password tried on 40 accounts at once", after: time.Hour, attempts: spray, pause: atOnce},
	}
}

// TestLoginAttack attacks the program over HTTP. With -v it prints the admissions and refusals.
func TestLoginAttack(t *testing.T) {
	t.Parallel()
	l := startLogin(t)
	var table strings.Builder
	fmt.Fprintf(&table, "   %-42s %8s %5s %7s %8s %7s  %-15s  %s\n", "who tries what", "at", "tries", "checked", "admitted", "refused", "by", "retry after")
	for i, a := range acts() {
		l.clock.advance(t, a.after)
		at := l.clock.passed()
		replies := l.perform(t, a)
		admitted, wrong := count(replies, http.StatusNoContent), count(replies, http.StatusUnauthorized)
		refused := count(replies, http.StatusTooManyRequests)
		require.Len(t, replies, admitted+wrong+refused)
		line := fmt.Sprintf("%d  %-42s %8s %5d %7d %8d %7d", i+1, a.title, short(at), len(replies), admitted+wrong, admitted, refused)
		if refused > 0 {
			by, wait := refusedBy(replies)
			line += fmt.Sprintf("  %-15s  %s", by, short(wait))
		}
		fmt.Fprintln(&table, line)
	}
	fmt.Fprintf(t.Output(), "%s", &table)
	require.Equal(t, attackTable, table.String())
}

func (l *login) perform(t *testing.T, a act) (replies []reply) {
	t.Helper()
	if a.pause == atOnce {
		return l.together(t, a.attempts)
	}
	for i, one := range a.attempts {
		if i > 0 {
			l.clock.advance(t, a.pause)
		}
		replies = append(replies, l.try(t, one))
	}
	return replies
}

// refusedBy returns the limits that refused, and the longest wait.
func refusedBy(replies []reply) (by string, wait time.Duration) {
	limits := map[string]bool{}
	for _, r := range replies {
		for _, name := range regexp.MustCompile(`login\.(\w+)`).FindAllStringSubmatch(r.body, -1) {
			limits[name[1]] = true
		}
		wait = max(wait, r.retryAfter)
	}
	return strings.Join(slices.Sorted(maps.Keys(limits)), ", "), wait
}

// The page of the examples shows what TestLoginAttack and TestGatewayLedger print.
func TestExamplesPage(t *testing.T) {
	t.Parallel()
	page := read(t, examples+"/README.md")
	require.Contains(t, page, "```text\n"+attackTable+"```\n")
	require.Contains(t, page, "```text\n"+ledgerTable+"```\n")
}
