package scenario_test

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
)

const (
	here  = "192.0.2.1"
	guess = "123456"

	// The limits of the program.
	perAccount, perClient, overall = 5, 30, 1000

	asLimited = "login.account" // names the limits that stop guesses
	asClient  = "login.client"
	asAll     = "login.all"
)

func passwordOf(login string) string { return login + " has a long password" }

// login is a running program with three accounts, behind a proxy that tells it the addresses of clients.
type login struct {
	*server
	database string
	pool     *pgxpool.Pool
	clock    *hand
	client   *http.Client
}

func startLogin(t *testing.T) *login {
	t.Helper()
	database, pool := newDatabase(t)
	l := &login{database: database, pool: pool, clock: stopClock(t, database, pool), client: client(200)}
	l.server = l.start(t)
	accounts.add(t, l)
	t.Cleanup(l.client.CloseIdleConnections)
	return l
}

// start starts another program on the database.
func (l *login) start(t *testing.T) *server {
	t.Helper()
	return start(t, l.database, "login", []string{"HASH_KEY=the secret of this test"}, "-trusted-proxies", "127.0.0.0/8")
}

// accounts are added by the program in the first database. Later ones get copies, because hashing takes a while.
var accounts stored

type stored struct {
	sync.Mutex
	hashes map[string][]byte
}

func (s *stored) add(t *testing.T, l *login) {
	t.Helper()
	s.Lock()
	defer s.Unlock()
	for name, hash := range s.hashes {
		execute(t, l.pool, `INSERT INTO login_users (login, password_hash) VALUES ($1, $2)`, name, hash)
	}
	if s.hashes != nil {
		return
	}
	hashes := map[string][]byte{}
	for _, name := range []string{"ada", "alan", "grace"} {
		output, err := invoke(t, l.database, "login", "-add", name+":"+passwordOf(name))
		require.NoError(t, err, output)
		hashes[name] = query[[]byte](t, l.pool, `SELECT password_hash FROM login_users WHERE login = $1`, name)
	}
	output, err := invoke(t, l.database, "login", "-add", "ADA:another")
	require.Error(t, err)
	require.Contains(t, output, `the account "ada" exists already`)
	s.hashes = hashes
}

// attempt is a sign-in, and reply its answer.
type (
	attempt struct{ login, password, from string }
	reply   struct {
		status     int
		retryAfter time.Duration
		cookies    []*http.Cookie
		header     http.Header
		body       string
	}
)

func (l *login) request(t *testing.T, a attempt) *http.Request {
	t.Helper()
	form := url.Values{"login": {a.login}, "password": {a.password}}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, l.url+"/login", strings.NewReader(form.Encode()))
	require.NoError(t, err)
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	request.Header.Set("X-Forwarded-For", a.from)
	return request
}

// send may be called on any goroutine.
func (l *login) send(request *http.Request) (r reply, err error) {
	response, err := l.client.Do(request)
	if err != nil {
		return reply{}, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	seconds, _ := strconv.Atoi(response.Header.Get("Retry-After")) // absent: 0
	return reply{response.StatusCode, time.Duration(seconds) * time.Second, response.Cookies(), response.Header, string(body)}, err
}

func (l *login) try(t *testing.T, a attempt) reply {
	t.Helper()
	if a.from == "" {
		a.from = here
	}
	r, err := l.send(l.request(t, a))
	require.NoError(t, err)
	return r
}

// together makes all attempts at once.
func (l *login) together(t *testing.T, attempts []attempt) []reply {
	t.Helper()
	requests, replies := make([]*http.Request, len(attempts)), make([]reply, len(attempts))
	for i, a := range attempts {
		requests[i] = l.request(t, a)
	}
	require.NoError(t, atonce.Do(len(attempts), func(i int) (err error) {
		replies[i], err = l.send(requests[i])
		return err
	}))
	return replies
}

func count(replies []reply, status int) (n int) {
	for _, r := range replies {
		if r.status == status {
			n++
		}
	}
	return n
}

// tokens returns the tokens of a bucket that has one row.
func (l *login) tokens(t *testing.T, limit string) float64 {
	t.Helper()
	return query[float64](t, l.pool, `SELECT value FROM ratelimit.buckets WHERE name = $1`, limit)
}

// leave leaves so many tokens in a bucket.
func (l *login) leave(t *testing.T, limit string, tokens int) {
	t.Helper()
	execute(t, l.pool, `UPDATE ratelimit.buckets SET value = $2 WHERE name = $1`, limit, tokens)
}

func (l *login) sessions(t *testing.T) int {
	t.Helper()
	return query[int](t, l.pool, `SELECT count(*) FROM login_sessions`)
}

// A limit lets as many guesses as it has tokens reach the password check, however many arrive at once, from however
// many addresses.
func TestLoginGuessesAtOnce(t *testing.T) {
	t.Parallel()
	l := startLogin(t)
	require.Equal(t, http.StatusUnauthorized, l.try(t, attempt{login: "ada", password: guess}).status)
	// Checking this hash fails, which shows that a refused attempt was not checked.
	execute(t, l.pool, `UPDATE login_users SET password_hash = 'no hash'`)
	var attempts []attempt
	for i := range 200 {
		attempts = append(attempts, attempt{
			login: []string{"ada", " ada", "ADA\t"}[i%3], password: guess,
			from: fmt.Sprintf("198.51.%d.%d", i/250, i%250+1), // a botnet
		})
	}
	replies := l.together(t, attempts)
	require.Equal(t, perAccount-1, count(replies, http.StatusServiceUnavailable))
	require.Equal(t, 200-perAccount+1, count(replies, http.StatusTooManyRequests))
}

func TestLoginLimits(t *testing.T) {
	t.Parallel()
	l := startLogin(t)
	l.try(t, attempt{login: "ada", password: guess})
	l.leave(t, asAll, 1)
	require.Equal(t, http.StatusUnauthorized, l.try(t, attempt{login: "ada", password: guess}).status)
	refused := l.try(t, attempt{"alan", passwordOf("alan"), "192.0.2.2"})
	require.Equal(t, http.StatusTooManyRequests, refused.status, "all clients together are limited")
	require.Contains(t, refused.body, asAll)

	l.leave(t, asAll, overall)
	l.url = start(t, l.database, "login", []string{"HASH_KEY=the secret of this test"}).url // no proxy in front
	for i := range 3 {
		require.Equal(t, http.StatusUnauthorized, l.try(t, attempt{fmt.Sprint("user", i), guess, fmt.Sprint("198.51.100.", i)}).status)
		l.leave(t, asClient, 2-i)
	}
	refused = l.try(t, attempt{"ada", passwordOf("ada"), "203.0.113.1"})
	require.Equal(t, http.StatusTooManyRequests, refused.status, "a client cannot forge its address")
}

// An attacker cannot learn which accounts exist: an unknown account gets the same answers as a wrong password, after
// the same work. Two programs take turns to answer, so that the work of each can be told from the processor time that
// it used.
func TestLoginUnknownAccount(t *testing.T) {
	t.Parallel()
	knows := startLogin(t)
	other := *knows
	other.server = other.start(t)
	try := func(l *login, name string) reply {
		r := l.try(t, attempt{name, guess, "203.0.113." + strconv.Itoa(len(name))})
		r.header.Del("Date")
		return r
	}
	for range perAccount {
		known := try(knows, "ada")
		require.Equal(t, http.StatusUnauthorized, known.status)
		require.Equal(t, known, try(&other, "nobody"))
	}
	known := try(knows, "ada")
	require.Equal(t, http.StatusTooManyRequests, known.status)
	require.Equal(t, known, try(&other, "nobody"))
	// Five checks of a password take two thirds of a program's time.
	require.Greater(t, other.stop(t), knows.stop(t)*2/3, "no password was hashed")
}

// A success fills the limit of the account only, and only together with the session, which only the browser knows.
func TestLoginSuccess(t *testing.T) {
	t.Parallel()
	l := startLogin(t)
	perAccounts := func() string {
		return query[string](t, l.pool, `SELECT array_agg(value ORDER BY value DESC)::text FROM ratelimit.buckets WHERE name = $1`, asLimited)
	}
	execute(t, l.pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$`)
	// It fails the COMMIT, after the session is written and the limit is reset.
	execute(t, l.pool, `CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON login_sessions DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()`)
	l.try(t, attempt{login: "grace", password: guess})
	l.try(t, attempt{login: "ada", password: guess})
	failed := l.try(t, attempt{login: "ada", password: passwordOf("ada")})
	require.Equal(t, http.StatusServiceUnavailable, failed.status)
	require.Empty(t, failed.cookies)
	require.Zero(t, l.sessions(t))
	require.Equal(t, `{4,3}`, perAccounts(), "the limit was reset without a session")

	execute(t, l.pool, `DROP TRIGGER refuse ON login_sessions`)
	cookies := l.try(t, attempt{login: " ADA", password: passwordOf("ada")}).cookies
	require.Equal(t, `{5,4}`, perAccounts())
	require.InDelta(t, perClient-3, l.tokens(t, asClient), 0, "the owner of an account must not clear the limit of an address")
	require.InDelta(t, overall-3, l.tokens(t, asAll), 0)
	require.Len(t, cookies, 1)
	require.True(t, cookies[0].HttpOnly)
	require.Equal(t, http.SameSiteLaxMode, cookies[0].SameSite)
	require.Equal(t, 1, l.sessions(t))
	require.Zero(t, query[int](t, l.pool, `SELECT count(*) FROM login_sessions WHERE position($1::bytea IN token_hash) > 0`, []byte(cookies[0].Value)))
}

// An invalid sign-in request costs nothing.
func TestLoginRejectsInvalidForms(t *testing.T) {
	t.Parallel()
	l := startLogin(t)
	for _, a := range []attempt{
		{},
		{login: "ada"},
		{login: " ", password: "x"},
		{login: "a\x00", password: "x"},
		{login: "ada\nalan", password: "x"},
		{login: "ada\xff", password: "x"},
		{login: strings.Repeat("a", 255), password: "x"},
		{login: "ada", password: strings.Repeat("x", 73)},
		{login: "ada", password: strings.Repeat("x", 1<<20)},
	} {
		require.Equal(t, http.StatusBadRequest, l.try(t, a).status, "%.40q", a)
	}
	for name, value := range map[string]string{"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"} {
		request := l.request(t, attempt{login: "ada", password: passwordOf("ada")})
		request.Header.Set(name, value)
		r, err := l.send(request)
		require.NoError(t, err)
		require.Equal(t, http.StatusForbidden, r.status, name)
	}
	require.Zero(t, query[int](t, l.pool, `SELECT count(*) FROM ratelimit.buckets`))
	require.Zero(t, l.sessions(t))
}

// After a failure no login is admitted.
func TestLoginFailsClosed(t *testing.T) {
	t.Parallel()
	l := startLogin(t)
	requireClosed := func() {
		t.Helper()
		failed := l.try(t, attempt{login: "ada", password: passwordOf("ada")})
		require.Equal(t, http.StatusServiceUnavailable, failed.status)
		require.NotZero(t, failed.retryAfter)
		require.Empty(t, failed.cookies)
		require.NotContains(t, failed.body, "SQLSTATE")
		require.Zero(t, l.sessions(t))
	}
	execute(t, l.pool, `ALTER TABLE login_users RENAME TO gone`)
	requireClosed()
	require.InDelta(t, perAccount-1, l.tokens(t, asLimited), 0, "the attempt stays charged")
	execute(t, l.pool, `ALTER TABLE gone RENAME TO login_users`)
	execute(t, l.pool, `ALTER SCHEMA ratelimit RENAME TO gone`)
	requireClosed()
}

// attackTable is what TestLoginAttack prints.
const attackTable = `   who tries what                                   at tries checked admitted refused  by               retry after
1  200 guesses at ada's password at once            0s   200       5        0     195  account          3m
2  ada, who knows it, meanwhile                     0s     1       0        0       1  account, locked  6m
3  ada, a second before Retry-After is over      5m59s     1       0        0       1  locked           1s
4  ada, when it is over                             6m     1       1        1       0
5  40 guesses at grace's, one every 45 s            6m    40      13        0      27  account, locked  23m15s
6  alan, who mistypes twice                     35m15s     2       2        0       0
7  alan, who then gets it right                 35m15s     1       1        1       0
8  a wrong password for ada, and for nobody     35m15s     2       2        0       0
9  one password tried on 40 accounts at once  1h35m15s    40      30        0      10  client           30s
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
		{title: "ada, a second before Retry-After is over", after: 6*time.Minute - time.Second, attempts: right("ada")},
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
			by, wait := refusedBy(replies, a.pause == atOnce)
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
// refusedBy returns the limits that refused attempts, and the longest wait. Of attempts at once it returns those that
// refused for the shortest time, because the account may be locked before the last of them arrives.
func refusedBy(replies []reply, atOnce bool) (by string, wait time.Duration) {
	refused := slices.DeleteFunc(slices.Clone(replies), func(r reply) bool { return r.retryAfter == 0 })
	slices.SortStableFunc(refused, func(a, b reply) int { return cmp.Compare(a.retryAfter, b.retryAfter) })
	if atOnce {
		refused = slices.DeleteFunc(refused, func(r reply) bool { return r.retryAfter > refused[0].retryAfter })
	}
	limits := map[string]bool{}
	for _, r := range refused {
		for _, name := range regexp.MustCompile(`login\.(\w+)`).FindAllStringSubmatch(r.body, -1) {
			limits[name[1]] = true
		}
	}
	return strings.Join(slices.Sorted(maps.Keys(limits)), ", "), refused[len(refused)-1].retryAfter
}

// The page of the examples shows what TestLoginAttack and TestGatewayLedger print.
func TestExamplesPage(t *testing.T) {
	t.Parallel()
	page := read(t, examples+"/README.md")
	require.Contains(t, page, "```text\n"+attackTable+"```\n")
	require.Contains(t, page, "```text\n"+ledgerTable+"```\n")
}
