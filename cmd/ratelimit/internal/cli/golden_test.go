package cli_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/golden"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// masked are the values that differ from run to run or from server to server: instants, IDs, fencing tokens, times until an instant,
// versions, and the findings of doctor.
var masked = regexp.MustCompile(`"\d{4}-\d\d-\d\dT[^"]*"|"[0-9a-f]{8}-[0-9a-f-]{27}"|("(?:fence|retry_after_us|reset_after_us|was|go|platform|level|says|do)": )(?:"(?:\\.|[^"\\])*"|[-+.e\d]+)`)

// TestJSON compares the answer of each command with -o json with testdata/json.txt.
func TestJSON(t *testing.T) {
	t.Parallel()
	f := setup(t)
	author := []string{"--author", "ana", "--reason", "a test"}
	sends := weekly("sends", "", 10)
	sends.Unit, sends.Description = "messages", "What a visitor may send."
	stated := file(t, "rules.yaml", `match: all
rules:
  - {limit: jobs, kind: concurrency, most: 3, lease: 1h}
  - {limit: sends, kind: fixed window, rate: 10, period: 7d, start: `+sends.Policy.(ratelimit.FixedWindow).Start.Format(time.RFC3339)+`, unit: messages, description: What a visitor may send.}
  - {limit: calls, plan: pro, rate: 5, period: day, capacity: 9, mode: shadow}
tiers:
  - {limit: sends, key: "{user}", route: POST /send, when: {plan: free}}
overrides:
  - {limit: sends, key: bob, multiplier: 2}
`)
	simulated, access := file(t, "simulated.yaml", "rules: [{limit: perAddress, rate: 2, period: minute}]"), file(t, "access.log", accessLog)
	jobs := ratelimit.Define("jobs", ratelimit.Concurrency{Most: 3, Lease: time.Hour})
	f.put(t, sends, rules.Rule{Limit: "jobs", Policy: ratelimit.Concurrency{Most: 3, Lease: time.Hour}})
	f.refuse(t, "sends", "POST /chat", "ada", 9, 5*time.Minute)
	limiter := f.limiter(t, ratelimit.Config{})
	_, err := limiter.Acquire(t.Context(), jobs.For("acme"))
	require.NoError(t, err)
	reservation := f.reserve(t, "later", "ada", 30)
	leases := read[[]struct{ Fence int64 }](t, f, 0, "leases", "list", "jobs", "acme")
	require.Len(t, leases, 1)
	names := strings.NewReplacer("FILE", stated, "SIMULATED", simulated, "LOG", access, "RESERVATION", reservation, "FENCE", fmt.Sprint(leases[0].Fence))

	var text strings.Builder
	for _, command := range []string{
		"version", "migrate status", "migrate up", "rules validate -f FILE", "rules list", "rules get sends",
		"take sends ada --cost 4", "check sends ada", "take sends ada --cost 7", "get sends ada", "get sends bob", "credit sends ada --cost 1", "reset sends ada --yes",
		"pause sends eve --for 1h", "get sends eve", "take sends eve", "resume sends eve",
		"top --by refusals", "top --by owed", "top --by reservations", "get later ada",
		"reservations list", "reservations cancel RESERVATION --yes", "leases list jobs acme", "get jobs acme", "leases release jobs acme --fence FENCE --yes",
		"prune sends --yes", "simulate -f SIMULATED --by address LOG", "get nothing ada",
		"rules diff -f FILE", "rules apply -f FILE --yes", "rules history", "doctor", "migrate partition 2 --yes", "migrate down --yes",
	} {
		args := split(names.Replace(command))
		if regexp.MustCompile(`^(rules apply|pause|resume)`).MatchString(command) {
			args = append(args, author...)
		}
		if command == "migrate partition 2 --yes" {
			f.pool.Close() // on Postgres 18 it refuses while another session is connected
		}
		r := f.run(t, append(args, "-o", "json")...)
		if command == "doctor" {
			r.code, r.out = 0, regexp.MustCompile(`,\n *"do": .*`).ReplaceAllString(r.out, "") // which depend on the server
		}
		fmt.Fprintf(&text, "== %s: exit code %d ==\n%s%s", command, r.code, r.out, r.err)
	}
	golden.Equal(t, "json.txt", strings.ReplaceAll(masked.ReplaceAllString(text.String(), "$1…"), stated, "FILE"))
}
