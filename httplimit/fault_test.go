package httplimit_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
)

// fault is one line of the table: the fault, the answer to the client, how often the handler ran, and the charge at the end.
type fault struct {
	arrange func(t *testing.T, s *stand)
	act     func(s *stand, t *testing.T) string // defaults to a GET
	sees    string
	ran     int64
	charged float64
	told    []string
}

// during makes the handler do what f does.
func during(f http.HandlerFunc) func(*testing.T, *stand) {
	return func(_ *testing.T, s *stand) { s.handler = f }
}

// all arranges several things.
func all(arrange ...func(*testing.T, *stand)) func(*testing.T, *stand) {
	return func(t *testing.T, s *stand) {
		t.Helper()
		for _, a := range arrange {
			a(t, s)
		}
	}
}

func crediting(_ *testing.T, s *stand) { s.config.Limits[0].Credit = httplimit.CreditOn5xx }
func open(_ *testing.T, s *stand)      { s.config.FailOpen = true }
func down(t *testing.T, s *stand)      { t.Helper(); s.asked = s.down(t) }
func shadow(t *testing.T, s *stand)    { t.Helper(); s.inShadow(t, perUser) }
func spendAll(t *testing.T, s *stand)  { t.Helper(); s.take(t, perUser.For("ada").Cost(3)) }

func panics(http.ResponseWriter, *http.Request) { panic("handler") }
func aborts(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

func panicsHalfWay(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Length", "100")
	_, _ = io.WriteString(w, "half")
	_ = http.NewResponseController(w).Flush()
	panic("handler")
}

// failsWhenLeft works until the client has gone, and fails because of that.
func failsWhenLeft(w http.ResponseWriter, r *http.Request) {
	<-r.Context().Done()
	w.WriteHeader(http.StatusInternalServerError)
}

const undecided = "503 rate limits cannot be checked; retry in 1 s"

var faults = map[string]fault{
	"Nothing": {sees: "200 done", ran: 1, charged: 1, told: []string{"allowed perUser"}},

	"ThePanickingHandlerIsPaidFor": {
		arrange: during(panics), sees: "connection closed", ran: 1, charged: 1, told: []string{"allowed perUser"},
	},
	"ThePanickingHandlerIsCredited": {
		arrange: all(during(panics), crediting), sees: "connection closed", ran: 1, charged: 0,
		told: []string{"allowed perUser", "credited perUser"},
	},
	"ThePanicHalfWayIsPaidFor": {
		arrange: all(during(panicsHalfWay), crediting), sees: "200, cut off after half", ran: 1, charged: 1,
		told: []string{"allowed perUser"},
	},
	"TheClientThatHangsUpPays": {
		arrange: all(during(failsWhenLeft), crediting), act: (*stand).hangUpDuringTheHandler, sees: "cancelled", ran: 1, charged: 1,
		told: []string{"allowed perUser"},
	},

	"TheSlowBody": {
		arrange: during(readsTheBody), act: (*stand).sendSlowly, sees: "200 read 4 bytes <nil>; meanwhile charged 1",
		ran: 1, charged: 1, told: []string{"allowed perUser"},
	},
	"TheSlowBodyThatIsRefused": {
		arrange: spendAll, act: (*stand).sendSlowlyAndBeRefused, sees: "429 without the rest of the body, then EOF",
		ran: 0, charged: 3, told: []string{"refused perUser"},
	},
	"TheBodyThatIsRefused": {
		arrange: spendAll, act: (*stand).sendAllAndBeRefused, sees: "429, then 429 on the same connection",
		ran: 0, charged: 3, told: []string{"refused perUser", "refused perUser"},
	},

	"TheServerIsDown":        {arrange: down, sees: undecided, ran: 0, charged: 0, told: []string{"failed_closed perUser"}},
	"TheServerIsDownAndOpen": {arrange: all(down, open), sees: "200 done", ran: 1, charged: 0, told: []string{"failed_open perUser"}},
	"TheServerIsDownInShadow": {
		arrange: all(shadow, down), sees: "200 done", ran: 1, charged: 0, told: []string{"shadow_failed_closed perUser"},
	},
}

// TestFaults checks the answer and the charge for each fault.
func TestFaults(t *testing.T) {
	t.Parallel()
	for name, f := range faults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t)
			if f.arrange != nil {
				f.arrange(t, s)
			}
			see := (*stand).get
			if f.act != nil {
				see = f.act
			}
			s.start(t)
			require.Equal(t, f.sees, see(s, t))
			s.server.Close() // which waits for the requests
			require.Equal(t, f.ran, s.ran.Load(), "times the handler ran")
			require.Equal(t, f.told, s.told.results())
			require.Equal(t, f.charged, s.charged(t, perUser.For("ada")))
			failed := strings.Contains(strings.Join(f.told, " "), "failed")
			require.Equal(t, failed, strings.Contains(s.log.String(), "level=ERROR"), s.log.String())
		})
	}
}

// TestASlowServerFailsClosed promises that a request gets the answer of a server that is down after the DecisionTimeout.
func TestASlowServerFailsClosed(t *testing.T) {
	t.Parallel()
	for open, code := range map[bool]int{false: http.StatusServiceUnavailable, true: http.StatusOK} {
		inBubble(t, nil, func(t *testing.T, b *bundle) {
			t.Helper()
			config := httplimit.Config{Limits: []httplimit.Limit{{Limit: windowed, Key: user}}, FailOpen: open, DecisionTimeout: time.Second}
			unlock, began := b.lock(t, windowed), time.Now()
			require.Equal(t, code, do(b.limited(t, config, respond()), request(t)).Code)
			require.Equal(t, time.Second, time.Since(began))
			unlock()
			require.Zero(t, b.charged(t, windowed.For("ada")))
		})
	}
}

// TestACreditThatFailsIsTold promises that a request stays charged if the server does not answer after its handler, and that the
// client has its answer.
func TestACreditThatFailsIsTold(t *testing.T) {
	t.Parallel()
	inBubble(t, nil, func(t *testing.T, b *bundle) {
		t.Helper()
		rule, unlock := httplimit.Limit{Limit: windowed, Key: user, Credit: httplimit.CreditOn5xx}, func() {}
		handler := b.limited(t, limits(rule), inline(func(e exchange) {
			unlock = b.lock(t, windowed)
			e.w.WriteHeader(http.StatusInternalServerError)
		}))
		require.Equal(t, http.StatusInternalServerError, do(handler, request(t)).Code)
		unlock()
		require.Equal(t, []string{"allowed windowed", "credit_failed windowed"}, b.told.results())
		require.Equal(t, 1.0, b.charged(t, windowed.For("ada")))
		require.Contains(t, b.log.String(), "rate limit credit failed")
	})
}

// TestFailuresAreLoggedOnceASecond promises a line for the first failure of a second, with the number of failures before it.
func TestFailuresAreLoggedOnceASecond(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // its clock stands still except where the test sleeps
		s := newStand(t)
		require.NoError(t, s.limiter.Close(t.Context()))
		handler := s.limited(t, s.config, mustNotRun(t))
		fail := func(times int) {
			for range times {
				require.Equal(t, http.StatusServiceUnavailable, do(handler, request(t)).Code)
			}
		}
		lines := func() int { return strings.Count(s.log.String(), "rate limits are not decided") }
		fail(5)
		require.Equal(t, 1, lines())
		require.Contains(t, s.log.String(), "omitted=0\n")
		time.Sleep(time.Second - 1)
		fail(1)
		require.Equal(t, 1, lines())
		time.Sleep(time.Nanosecond)
		fail(2)
		require.Equal(t, 2, lines())
		require.Contains(t, s.log.String(), "omitted=5\n")
		require.NotContains(t, s.log.String(), "ada")
	})
}
