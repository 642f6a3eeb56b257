package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// table is what the program promises to print. README.md shows it too.
const table = `   who tries what                                   at tries checked admitted refused  by             retry after
1  200 guesses at ada's password at once             0   200       5        0     195  login.account  3m
2  ada, who knows it, meanwhile                      0     1       0        0       1  login.account  3m
3  ada, a second before Retry-After is over      2m59s     1       0        0       1  login.account  1s
4  ada, when it is over                             3m     1       1        1       0
5  40 guesses at grace's, one every 45 s            3m    40      14        0      26  login.account  2m15s
6  alan, who mistypes twice                     32m15s     2       2        0       0
7  alan, who then gets it right                 32m15s     1       1        1       0
8  a wrong password for ada, and for nobody     32m15s     2       2        0       0
9  one password tried on 40 accounts at once  1h32m15s    40      30        0      10  login.client   30s
`

func TestRun(t *testing.T) {
	t.Parallel()

	t.Run("PlaysTheAttackAndSucceeds", func(t *testing.T) {
		t.Parallel()
		var out bytes.Buffer
		require.NoError(t, run(t.Context(), &out, options{server: postgrestest.NewEmptyDatabase(t), cost: cheap()}))
		require.Contains(t, out.String(), table)
		require.Contains(t, out.String(), "Everything was admitted and refused as it should be: 55 password hashes")

		_, rows, found := strings.Cut(out.String(), "The rows of ratelimit.buckets")
		require.True(t, found)
		for _, row := range []string{
			`1  login\.account  \S{6}  no row: full      ->  \(0, 0\)`, // the guesses took all five
			`2  none`, // a refusal changes nothing
			`4  login\.account  \S{6}  \(0, 0\)            ->  \(5, 3m\)`,           // ada got in: full again
			`4  login\.client   \S{6}  \(25, 0\)           ->  \(30, 3m\)`,          // full after 3 minutes, and what ada took is back
			`6  login\.account  \S{6}  no row: full      ->  \(3, 32m15s\)`,         // alan's two mistakes
			`7  login\.account  \S{6}  \(3, 32m15s\)       ->  \(5, 32m15s\)`,       // forgotten
			`9  login\.account  and 27 more`,                                        // 30 accounts tried, none of the refused 10
			`9  login\.client   \S{6}  \(26, 32m15s\)      ->  \(0, 1h32m15s\)`,     // and no token left
			`9  login\.all              \(99\d, 32m15s\)     ->  \(970, 1h32m15s\)`, // of everybody's
		} {
			require.Regexp(t, `(?m)^`+row+`$`, rows)
		}
	})

	t.Run("FailsWhenAnActEndsOtherwise", func(t *testing.T) {
		t.Parallel()
		st := setup(t)
		_, err := st.auth.limiter.Take(t.Context(), perAccount.For("ada")) // one guess too few will be looked at
		require.NoError(t, err)
		listening := httptest.NewServer(st.handler)
		defer listening.Close()
		st.url = listening.URL

		var out bytes.Buffer
		err = st.play(t.Context(), &out)
		require.ErrorContains(t, err, "act 1 did not end as it should")
		require.NotContains(t, err.Error(), "act 2")
		require.Contains(t, out.String(), "MISMATCH: this was {in:0 wrong:4 refused:196 hashes:4")
	})

	t.Run("ServesABrowserUntilItIsStopped", func(t *testing.T) {
		t.Parallel()
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		read, write := io.Pipe()
		done := make(chan error, 1)
		o := options{listen: "127.0.0.1:0", server: postgrestest.NewEmptyDatabase(t), cost: cheap()}
		go func() {
			err := run(ctx, write, o)
			done <- err
			_ = write.CloseWithError(err)
		}()
		lines := bufio.NewReader(read)
		line, err := lines.ReadString('\n')
		require.NoError(t, err)
		go func() { _, _ = io.Copy(io.Discard, lines) }()
		printed := regexp.MustCompile(`^http://localhost:(\d+), where "ada" signs in with "(.+)"; Ctrl-C`).FindStringSubmatch(line)
		require.Len(t, printed, 3, line)

		form := strings.NewReader("login=ada&password=" + strings.ReplaceAll(printed[2], " ", "+"))
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://127.0.0.1:"+printed[1]+"/login", form)
		require.NoError(t, err)
		request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		response, err := new(http.Transport).RoundTrip(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, http.StatusSeeOther, response.StatusCode)

		stop()
		require.NoError(t, <-done)
	})
}

func TestReadme(t *testing.T) {
	t.Parallel()

	t.Run("ShowsWhatTheProgramPrints", func(t *testing.T) {
		t.Parallel()
		readme, err := os.ReadFile("README.md")
		require.NoError(t, err)
		require.Contains(t, string(readme), table)
	})
}
