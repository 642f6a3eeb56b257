package simulate_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/simulate"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// three holds 3 tokens a minute for each user.
const three = `rules: [{limit: user, rate: 3, period: minute}]`

// document returns what a rules file says.
func document(t testing.TB, yaml string) rules.Document {
	t.Helper()
	d, err := rules.Read(strings.NewReader(yaml))
	require.NoError(t, err)
	return *d
}

// rows returns CSV of the rows, whose first column is the second of a minute.
func rows(columns string, rows ...string) io.Reader {
	text := "time," + columns + "\n"
	for _, row := range rows {
		second, rest, _ := strings.Cut(row, ",")
		text += fmt.Sprintf("2026-03-01T12:00:%02sZ,%s\n", second, rest)
	}
	return strings.NewReader(text)
}

func second(n int) time.Time { return time.Date(2026, 3, 1, 12, 0, n, 0, time.UTC) }

// run replays rows that are fit to be replayed.
func run(t testing.TB, config simulate.Config, in io.Reader) *simulate.Report {
	t.Helper()
	r, err := simulate.Run(t.Context(), config, in)
	require.NoError(t, err)
	require.Equal(t, r.Rows, r.Failed.Count+r.Unlimited+r.Admitted+r.Refused)
	return r
}

func TestRun(t *testing.T) {
	t.Parallel()

	t.Run("ReportsTheRefusalsWithTimes", func(t *testing.T) {
		t.Parallel()
		r := run(t, simulate.Config{Rules: document(t, three), By: "user", Top: 1},
			rows("user,cost", "00,ada,", "00,ada,2", "00,bob,1", "01,ada,1", "02,ada,1", "20,ada,1", "21,bob,3", "22,bob,4"))
		require.Equal(t, &simulate.Report{
			From: second(0), To: second(22), Rows: 8, Admitted: 5, Refused: 2, Buckets: 2, UnknownPlans: []string{},
			Limits: []simulate.LimitReport{{Limit: "user", Asked: 7, Refusals: simulate.Refusals{Refused: 2, First: second(1), Last: second(2)}}},
			Keys: []simulate.KeyReport{{
				simulate.Bucket{Limit: "user", Key: "ada"}, simulate.Refusals{Refused: 2, First: second(1), Last: second(2)},
			}},
			Failed: simulate.Problems{Count: 1, First: []simulate.Problem{{9, `ratelimit: cost exceeds capacity: 4 of "user", which allows at most 3; lower the cost or raise the capacity`}}},
		}, r)
	})

	t.Run("TakesFromAllLimitsOrFromNone", func(t *testing.T) {
		t.Parallel()
		r := run(t, simulate.Config{Rules: document(t, `
match: all
rules:
  - {limit: address, rate: 2, period: hour}
  - {limit: search, rate: 1, period: hour}
  - {limit: trial, rate: 1, period: hour, mode: shadow}
  - {limit: unused, rate: 1, period: hour, mode: off}
tiers:
  - {limit: address, key: "{address}"}
  - {limit: search, key: "{address}", route: "GET /search/{id}", cost_source: "header:x-cost"}
  - {limit: trial}
  - {limit: unused}
`)}, rows("address,route,header:x-cost", "0,2001:db8::1,GET /search/{id},1", "1,2001:db8::2,GET /search/{id},1", "2,2001:db8::3,POST /search,", "3,2001:db8::4,GET /,"))
		require.EqualValues(t, 2, r.Refused, "the second by search, and took nothing from address; the fourth by address")
		counts := make(map[string][3]int64)
		for _, l := range r.Limits {
			counts[l.Limit] = [...]int64{l.Asked, l.Refused, l.Shadow}
		}
		require.Equal(t, map[string][3]int64{"address": {4, 1, 0}, "search": {2, 1, 0}, "trial": {4, 3, 3}, "unused": {0, 0, 0}}, counts)
	})

	t.Run("DecidesByTheMostSpecificRule", func(t *testing.T) {
		t.Parallel()
		config := simulate.Config{By: "{user}", Top: 10, Rules: document(t, `
rules:
  - {limit: user, rate: 1, period: hour}
  - {limit: user, rate: 2, period: hour, plan: pro}
overrides:
  - {limit: user, key: ada, multiplier: 4, until: 2026-03-01T12:00:30Z}
`)}
		r := run(t, config, rows("user,plan", "0,bob,", "0,bob,", "0,eve,pro", "0,eve,pro", "0,eve,pro", "0,ada,", "0,ada,", "0,ada,", "0,ada,", "0,ada,", "31,ada,por"))
		refused := make(map[string]int64)
		for _, k := range r.Keys {
			refused[k.Key] = k.Refused
		}
		require.Equal(t, map[string]int64{"bob": 1, "eve": 1, "ada": 2}, refused)
		require.Equal(t, []string{"por"}, r.UnknownPlans)
	})

	t.Run("CountsRequestsThatNoLimitDecides", func(t *testing.T) {
		t.Parallel()
		users := simulate.Config{Rules: document(t, "rules: [{limit: user, rate: 1, period: hour}]\nmatch: all\ntiers: [{limit: user, key: '{user}', when: {user: '*'}}]")}
		r := run(t, users, rows("user", "0,", "0,ada"))
		require.Equal(t, []int64{1, 1}, []int64{r.Unlimited, r.Admitted})
		_, err := simulate.Run(t.Context(), users, rows("user", "0,"))
		require.ErrorContains(t, err, "no tier fits any of 1 requests by its key, when and route")

		byUser := simulate.Config{Rules: document(t, three), By: "user"}
		require.Equal(t, []simulate.Problem{{2, `ratelimit: invalid key: the key of "user" needs the attribute "user", and the request has none`}},
			run(t, byUser, rows("user", "0,", "0,ada")).Failed.First)
		_, err = simulate.Run(t.Context(), byUser, rows("user", "0,"))
		require.ErrorContains(t, err, `no request was decided; line 2: ratelimit: invalid key`)
	})

	t.Run("ReadsTimesAsPsqlPrintsThem", func(t *testing.T) {
		t.Parallel()
		for _, at := range []string{
			"2026-03-01 12:00:00", "2026-03-01T12:00:00", "2026-03-01 12:00:00+00", "2026-03-01 17:30:00.000+05:30", "2026-03-01T07:00:00-05:00",
		} {
			r := run(t, simulate.Config{Rules: document(t, three), By: "user"}, strings.NewReader("time,user\n"+at+",ada\n"))
			require.True(t, second(0).Equal(r.From), at)
		}
	})

	t.Run("CountsStatedCosts", func(t *testing.T) {
		t.Parallel()
		by := simulate.Config{Rules: document(t, three), By: "user"}
		r := run(t, by, strings.NewReader("\ufeff\"time\", user , cost\n2026-03-01T12:00:00Z,ada,0.5\n"+
			"2026-03-01T12:00:00Z,ada,2.5\n2026-03-01T12:00:00Z,ada,0.5\n2026-03-01T12:00:00Z,bob,3\n"))
		require.Equal(t, []int64{3, 1}, []int64{r.Admitted, r.Refused})
		tiers := simulate.Config{Rules: document(t, three+"\ntiers: [{limit: user, cost_source: 'header:x-tokens'}]\nmatch: all")}
		r = run(t, tiers, rows("header:x-tokens", "0,2", "0,2", "0,"))
		require.Equal(t, []int64{2, 1}, []int64{r.Admitted, r.Refused})
		for _, column := range []string{"x-tokens", "cost"} {
			_, err := simulate.Run(t.Context(), tiers, rows(column, "0,2"))
			require.ErrorIs(t, err, simulate.ErrInvalidRows)
			require.ErrorContains(t, err, `there is no column "header:x-tokens", which has the cost of a tier`)
		}
		for _, cost := range []string{"0", "-3", "abc", `"1,5"`, "NaN", "Inf", "1e999"} {
			_, err := simulate.Run(t.Context(), by, rows("user,cost", "0,ada,1", "0,ada,"+cost))
			require.ErrorIs(t, err, simulate.ErrInvalidRows, cost)
			require.ErrorContains(t, err, fmt.Sprintf("line 3: its cost is %q; write a number above 0", strings.Trim(cost, `"`)))
		}
	})

	t.Run("EndsWithItsContextAndItsInput", func(t *testing.T) {
		t.Parallel()
		config := simulate.Config{Rules: document(t, three), By: "user"}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := simulate.Run(ctx, config, rows("user", "0,ada"))
		require.ErrorIs(t, err, context.Canceled)
		broken := errors.New("broken")
		_, err = simulate.Run(t.Context(), config, io.MultiReader(rows("user", "0,ada"), iotest.ErrReader(broken)))
		require.ErrorIs(t, err, broken)
	})
}

func TestRunRefuses(t *testing.T) {
	t.Parallel()
	two := document(t, `rules: [{limit: a, rate: 1, period: 1s}, {limit: b, rate: 1, period: 1s}]`)
	for text, config := range map[string]simulate.Config{
		"no tiers": {Rules: two},
		"name the limit to ask by \"user\", because the rules have 2: a, b": {Rules: two, By: "user"},
		"nobody knows the limit \"c\"":                                      {Rules: two, By: "user", Limit: "c"},
		"its Key is \"{user}{plan}\"":                                       {Rules: two, By: "{user}{plan}", Limit: "a"},
		"HashKey has":                                                       {Rules: two, By: "user", Limit: "a", HashKey: []byte("short")},
	} {
		_, err := simulate.Run(t.Context(), config, rows("user", "0,ada"))
		require.ErrorIs(t, err, simulate.ErrInvalidConfig, text)
		require.ErrorContains(t, err, text)
	}
	for text, want := range map[string]string{
		"":                                  "no list of columns with one called time",
		"at,user\n1,ada\n":                  "no list of columns with one called time",
		"time,user, user\n":                 `the column "user" is there twice`,
		"time,user\n2026-03-01T12:00:00Z\n": "line 2: wrong number of fields",
		"time,user\n12:00,ada\n":            `line 2: its time is "12:00"; write it as`,
		"time,user\n2026-03-01T12:00:01Z,a\n2026-03-01T12:00:00Z,a\n":     "line 3: its time 2026-03-01T12:00:00Z is before the time of the row above",
		"time,user\n2026-03-01T12:00:01Z,\"a\n2026-03-01T12:00:00Z,a\n\n": "quote",
	} {
		_, err := simulate.Run(t.Context(), simulate.Config{Rules: two, By: "user", Limit: "a"}, strings.NewReader(text))
		require.ErrorIs(t, err, simulate.ErrInvalidRows, text)
		require.ErrorContains(t, err, want)
	}
}
