package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// table is what the program promises to print. README.md shows it too.
const table = `at      who asks, all at once                           stopped by              asked admitted allowed refused shadow
0s      4 keys on the free plan                         gateway.key, plan free    400      240     240     160      0
0s      2 keys on the pro plan, 10 tokens a request     gateway.key, plan pro     200      120     120      80      0
0s      4 visitors without a key                        gateway.key, plan free    320      240     240      80      0
0s      3 pro keys in an office with one address        gateway.address           180      120     120      60      0
0s      a visitor who forges addresses and cookies      gateway.key, plan free    150       60      60      90      0
0s      a visitor who has 2^64 addresses of IPv6        gateway.key, plan free    100       60      60      40      0
0s      somebody who guesses keys and forges addresses  gateway.address           200      120     120      80      0
0s      a pro key that states a cost of 1000000         gateway.key, plan pro      20        6       6      14      0
30s     4 keys on the free plan                         gateway.key, plan free    400      120     120     280    320
30s     2 keys on the pro plan, 10 tokens a request     gateway.key, plan pro     200       60      60     140      0
30s     4 visitors without a key                        gateway.key, plan free    320      120     120     200    240
30s     3 pro keys in an office with one address        gateway.address           180       60      60     120      0
30s     a visitor who forges addresses and cookies      gateway.key, plan free    150       30      30     120    130
30s     a visitor who has 2^64 addresses of IPv6        gateway.key, plan free    100       30      30      70     80
30s     somebody who guesses keys and forges addresses  gateway.address           200       60      60     140      0
30s     a pro key that states a cost of 1000000         gateway.key, plan pro      20        3       3      17      0
1h0m30s 12 pro keys that spend all they have at once    gateway.all                72       50      50      22      0

rule                    admitted /metrics   refused /metrics
gateway.address             1499     1499       400      400
gateway.all                 1319     1319        22       22
gateway.daily                800      800       770      770
gateway.key, plan free       900      900      1040     1040
gateway.key, plan pro        419      419       251      251

The upstream served 1319 requests for 8780 tokens; the clients got 1319 answers for 8780.
`

func TestRun(t *testing.T) {
	t.Parallel()

	t.Run("AdmitsWhatTheLimitsAllow", func(t *testing.T) {
		t.Parallel()
		testsize.Long(t, "sends 3,000 requests through the whole gateway")
		var out bytes.Buffer
		require.NoError(t, run(t.Context(), &out, options{server: postgrestest.NewEmptyDatabase(t)}), &out)
		require.Contains(t, out.String(), table)
		require.Regexp(t, changes, out.String())
		require.Contains(t, out.String(), "Everything was admitted and refused as the limits allow")
	})

	t.Run("FailsWhenMoreIsAdmittedThanAllowed", func(t *testing.T) {
		t.Parallel()
		acts, err := acts()
		require.NoError(t, err)
		acts[0].parties[0].left-- // what is allowed is one less for each of 4 keys
		clock := newClock()
		var out bytes.Buffer
		_, err = on(t.Context(), &out, config{pool: postgrestest.New(t), asOf: clock.Now}, func(p *play) error {
			return p.run(t.Context(), &out, acts[:1], clock)
		})
		require.ErrorContains(t, err, "at 0s, 4 keys on the free plan: 240 were admitted, the limits allow 236")
		require.NotContains(t, err.Error(), "visitor")
	})

	t.Run("ServesABrowserUntilItIsStopped", func(t *testing.T) {
		t.Parallel()
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		read, write := io.Pipe()
		done := make(chan error, 1)
		o := options{listen: "127.0.0.1:0", server: postgrestest.NewEmptyDatabase(t)}
		go func() {
			err := run(ctx, write, o)
			done <- err
			_ = write.CloseWithError(err)
		}()
		lines := bufio.NewReader(read)
		line := func(pattern string) string {
			line, err := lines.ReadString('\n')
			require.NoError(t, err)
			printed := regexp.MustCompile(pattern).FindStringSubmatch(line)
			require.Len(t, printed, 2, line)
			return printed[1]
		}
		port := line(`^http://localhost:(\d+)/ shows a visitor what is left; Ctrl-C ends it\n$`)
		path := line(`^http://localhost:` + port + `(/\S+) takes the API keys free-key and pro-key, as in Authorization: Bearer free-key\n$`)
		passwords := line(`^http://localhost:` + port + `/admin/ asks for your name and a password: (\w+ to look, \w+ to change limits)\n$`)
		line(`^http://localhost:` + port + `(/playground/) shows what limits do\n$`)
		go func() { _, _ = io.Copy(io.Discard, lines) }()
		url := "http://127.0.0.1:" + port
		require.Eventually(t, func() bool { // a machine that is slow may take longer than a decision may
			return get(t, url+path, map[string]string{"Authorization": "Bearer free-key"}).status == http.StatusOK
		}, patience, time.Millisecond)
		require.Equal(t, http.StatusOK, get(t, url+"/", nil).status)
		words := strings.Fields(passwords)
		got := get(t, url+"/admin/", map[string]string{"Authorization": as("ana", words[0])})
		require.Contains(t, got.body, "read-only")
		got = get(t, url+"/admin/", map[string]string{"Authorization": as("ana", words[3])})
		require.Equal(t, http.StatusOK, got.status)
		require.NotContains(t, got.body, "read-only")
		require.Equal(t, http.StatusOK, get(t, url+"/playground/", nil).status)
		stop()
		require.NoError(t, <-done)
	})
}

func TestCompare(t *testing.T) {
	t.Parallel()

	t.Run("FailsWhenMetricsSayOtherwise", func(t *testing.T) {
		t.Parallel()
		clients := totals{limits: map[string]counted{"a": {1, 2}, "b": {3, 4}}}
		require.NoError(t, clients.compare(io.Discard, map[string]counted{"a": {1, 2}, "b": {3, 4}}))
		err := clients.compare(io.Discard, map[string]counted{"a": {1, 2}, "b": {3, 5}})
		require.EqualError(t, err, "of b the clients saw {took:3 refused:4}, /metrics counted {took:3 refused:5}")
	})

	t.Run("FailsWhenTheUpstreamServedMore", func(t *testing.T) {
		t.Parallel()
		served := new(upstream)
		served.requests.Add(1)
		require.Error(t, new(totals).compareUpstream(io.Discard, served))
	})
}

func TestReadme(t *testing.T) {
	t.Parallel()

	t.Run("ShowsWhatTheProgramPrints", func(t *testing.T) {
		t.Parallel()
		readme, err := os.ReadFile("README.md")
		require.NoError(t, err)
		require.Contains(t, string(readme), strings.TrimSuffix(table, "\n"))
	})
}
