package httplimit_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
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
func hurried(_ *testing.T, s *stand)   { s.config.DecisionTimeout = 200 * time.Millisecond }

func shadow(t *testing.T, s *stand) {
	t.Helper()
	s.inShadow(t, perUser)
}

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

var faults = map[string]fault{
	"Nothing": {sees: "200 done", ran: 1, charged: 1, told: []string{"allowed perUser"}},

	"ThePanickingHandlerIsPaidFor": {
		arrange: during(panics), sees: "connection closed", ran: 1, charged: 1, told: []string{"allowed perUser"},
	},
	"ThePanickingHandlerIsCredited": {
		arrange: all(during(panics), crediting), sees: "connection closed", ran: 1, charged: 0,
		told: []string{"allowed perUser", "credited perUser"},
	},
	"TheAbortedResponseIsCredited": {
		arrange: all(during(aborts), crediting), sees: "connection closed", ran: 1, charged: 0,
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
	"TheClientThatHangsUpBeforeTheDecision": {
		arrange: lockTheBucket, act: (*stand).hangUpDuringTheDecision, sees: "cancelled", ran: 0, charged: 0,
		told: []string{"cancelled perUser"},
	},
	"TheClientThatHangsUpBeforeTheDecisionWhenOpen": {
		arrange: all(lockTheBucket, open), act: (*stand).hangUpDuringTheDecision, sees: "cancelled", ran: 0, charged: 0,
		told: []string{"cancelled perUser"},
	},

	"TheSlowBody": {
		arrange: during(readsTheBody), act: (*stand).sendSlowly, sees: "200 read 4 bytes <nil>; meanwhile charged 1 and 0 transactions open",
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

	"TheServerIsDown": {
		arrange: down, sees: "503 rate limits cannot be checked; retry in 1 s", ran: 0, charged: 0, told: []string{"failed_closed perUser"},
	},
	"TheServerIsDownAndOpen": {
		arrange: all(down, open), sees: "200 done", ran: 1, charged: 0, told: []string{"failed_open perUser"},
	},
	"TheServerIsDownInShadow": {
		arrange: all(shadow, down), sees: "200 done", ran: 1, charged: 0, told: []string{"shadow_failed_closed perUser"},
	},
	"TheServerIsSlow": {
		arrange: all(lockTheBucket, hurried), act: (*stand).getThenUnlock, sees: "503 rate limits cannot be checked; retry in 1 s", ran: 0, charged: 0,
		told: []string{"failed_closed perUser"},
	},
	"TheServerIsSlowAndOpen": {
		arrange: all(lockTheBucket, hurried, open), act: (*stand).getThenUnlock, sees: "200 done", ran: 1, charged: 0,
		told: []string{"failed_open perUser"},
	},
	"TheAnswerIsLost": { // after the commit
		arrange: loseAnswers, sees: "503 rate limits cannot be checked; retry in 1 s", ran: 0, charged: 1,
		told: []string{"failed_closed perUser"},
	},
	"TheServerGoesDownBeforeTheCredit": {
		arrange: downDuringTheHandler, sees: "500 failed", ran: 1, charged: 1,
		told: []string{"allowed perUser", "credit_failed perUser"},
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

// TestOpenIsNotOpenToThoseWhoAskTooMuch promises that FailOpen allows no request that failed for a reason that clients can provoke
// with many requests, nor one while the program ends.
func TestOpenIsNotOpenToThoseWhoAskTooMuch(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	var err error
	s.asked, err = ratelimit.New(s.pool, ratelimit.Config{AsOf: s.clock, Observer: s.told, MaxWaiting: 1})
	require.NoError(t, err)
	open(t, s)
	lockTheBucket(t, s)
	s.start(t)
	seen := make(chan string)
	ask := func() { seen <- s.describe(t.Context()) }
	go ask()
	s.waiting(t, 1)
	for range 3 {
		go ask()
	}
	const undecided = "503 rate limits cannot be checked; retry in 1 s"
	for range 2 { // one asks the store, and one waits for it
		require.Equal(t, undecided, <-seen)
	}
	s.unlock()
	for range 2 {
		require.Equal(t, "200 done", <-seen)
	}
	require.NoError(t, s.asked.Close(t.Context()))
	require.Equal(t, undecided, s.get(t))
	require.Equal(t, []string{
		"failed_closed perUser", "failed_closed perUser", "allowed perUser", "allowed perUser", "failed_closed perUser",
	}, s.told.results())
	require.Equal(t, 2.0, s.charged(t, perUser.For("ada")))
}
