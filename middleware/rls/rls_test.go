package rls_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/middleware/rls"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/rules"
)

const document = `
match: all
rules:
  - {limit: address, rate: 3, period: minute}
  - {limit: user, rate: 10, period: minute, plan: pro}
  - {limit: user, rate: 2, period: minute}
  - {limit: site, rate: 100, period: 5m}
  - {limit: tried, rate: 1, period: hour, mode: shadow}
  - {limit: tokens, rate: 1000, period: hour}
  - {limit: tenth, rate: 0.1, period: minute, capacity: 3}
  - {limit: held, kind: concurrency, slots: 2, lease: 30s}
tiers:
  - {limit: address, key: "{remote_address}", when: {remote_address: "*"}}
  - {limit: user, key: "{user}", when: {user: "*"}}
  - {limit: site, when: {generic_key: site}}
  - {limit: tried, when: {generic_key: tried}}
  - {limit: tokens, key: "{tenant}", when: {model: "*"}}
  - {limit: tenth, when: {generic_key: tenth}}
  - {limit: held, when: {generic_key: held}}
`

// service is a server with a real client.
type service struct {
	ratelimitv3.RateLimitServiceClient
	t       testing.TB
	limiter *ratelimit.Limiter
	now     *time.Time
	log     *testkit.Journal // with the results, too

	answered []event.Answered
}

func newService(t testing.TB) *service {
	t.Helper()
	file, err := rules.Read(strings.NewReader(document))
	require.NoError(t, err)
	set, err := rules.SetOf(*file, nil)
	require.NoError(t, err)
	site, err := rules.NewSite(set, rules.SiteConfig{Attributes: []string{"remote_address", "generic_key", "model"}})
	require.NoError(t, err)
	now := time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)
	s := &service{t: t, now: &now, log: &testkit.Journal{}}
	s.limiter, err = ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{
		Policies: set, AsOf: func() time.Time { return now },
		Observer: observer(func(e event.Event) {
			if a, ok := e.(event.Answered); ok {
				fmt.Fprintln(s.log, "answered", a.Result)
				s.answered = append(s.answered, a)
			}
		}),
	})
	require.NoError(t, err)
	answers, err := rls.New(s.limiter, rls.Config{
		Domains: map[string]rls.Domain{"edge": {Site: site}, "spent": {Site: site, Charge: true}}, Logger: slog.New(slog.NewTextHandler(s.log, nil)),
	})
	require.NoError(t, err)
	server, listener := grpc.NewServer(), bufconn.Listen(1<<16)
	ratelimitv3.RegisterRateLimitServiceServer(server, answers)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	client, err := grpc.NewClient("passthrough:rls", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, client.Close())
		server.Stop()
		require.NoError(t, <-served)
	})
	s.RateLimitServiceClient = ratelimitv3.NewRateLimitServiceClient(client)
	return s
}

type descriptors = []*commonv3.RateLimitDescriptor

// descriptor returns a descriptor of entries such as "user=ada".
func descriptor(entries ...string) *commonv3.RateLimitDescriptor {
	d := &commonv3.RateLimitDescriptor{}
	for _, e := range entries {
		key, value, _ := strings.Cut(e, "=")
		d.Entries = append(d.Entries, &commonv3.RateLimitDescriptor_Entry{Key: key, Value: value})
	}
	return d
}

func withHits(d *commonv3.RateLimitDescriptor, hits uint64) *commonv3.RateLimitDescriptor {
	d.HitsAddend = wrapperspb.UInt64(hits)
	return d
}

// ask returns the answer to a call, and the text of its statuses.
func (s *service) ask(domain string, hits uint32, descriptors ...*commonv3.RateLimitDescriptor) (*ratelimitv3.RateLimitResponse, string) {
	s.t.Helper()
	r, err := s.ShouldRateLimit(s.t.Context(), &ratelimitv3.RateLimitRequest{Domain: domain, Descriptors: descriptors, HitsAddend: hits})
	require.NoError(s.t, err)
	var text []string
	for _, st := range r.GetStatuses() {
		one := st.GetCode().String()
		if l := st.GetCurrentLimit(); l != nil {
			times := l.GetUnitMultiplier().GetValue()
			one += " " + strings.Join([]string{l.GetName(), number(l.GetRequestsPerUnit()), "per", number(times), l.GetUnit().String()}, " ")
			one += " left " + number(st.GetLimitRemaining()) + " reset " + st.GetDurationUntilReset().AsDuration().String()
		}
		text = append(text, one)
	}
	return r, r.GetOverallCode().String() + ": " + strings.Join(text, "; ")
}

func number(n uint32) string { return strconv.FormatUint(uint64(n), 10) }

// TestAnswers tells a story on one clock.
func TestAnswers(t *testing.T) {
	t.Parallel()
	s := newService(t)
	for _, step := range []struct {
		name        string
		after       time.Duration
		domain      string
		hits        uint32
		descriptors descriptors
		want        string
	}{
		{"an unknown domain", 0, "other", 0, descriptors{descriptor("user=ada")}, "OK: OK"},
		{"no tier fits", 0, "edge", 0, descriptors{descriptor("path=/")}, "OK: OK"},
		{
			"each descriptor has a status", 0, "edge", 2,
			descriptors{descriptor("remote_address=192.0.2.7"), descriptor("path=/"), descriptor("generic_key=site")},
			"OK: OK address 3 per 0 MINUTE left 1 reset 40s; OK; OK site 100 per 5 MINUTE left 98 reset 6s",
		},
		{
			"all or nothing: site keeps its tokens", 0, "edge", 2,
			descriptors{descriptor("remote_address=192.0.2.7"), descriptor("generic_key=site")},
			"OVER_LIMIT: OVER_LIMIT address 3 per 0 MINUTE left 0 reset 20s; OK site 100 per 5 MINUTE left 98 reset 6s",
		},
		{
			"the wait is exact", 20 * time.Second, "edge", 2,
			descriptors{descriptor("remote_address=192.0.2.7")},
			"OK: OK address 3 per 0 MINUTE left 0 reset 1m0s",
		},
		{
			"the plan of a key selects its rule", 0, "edge", 5,
			descriptors{descriptor("user=ada", "plan=pro")},
			"OK: OK user 10 per 0 MINUTE left 5 reset 30s",
		},
		{
			"more than a limit can ever give", 0, "edge", 3,
			descriptors{descriptor("user=bob"), descriptor("generic_key=site")},
			"OVER_LIMIT: OVER_LIMIT user 2 per 0 MINUTE left 0 reset 0s; OK site 100 per 5 MINUTE left 100 reset 0s",
		},
		{
			"hits of a descriptor go before hits of the call, and 0 takes nothing", 0, "edge", 9,
			descriptors{withHits(descriptor("user=bob"), 1), withHits(descriptor("user=cyd"), 0)},
			"OK: OK user 2 per 0 MINUTE left 1 reset 30s; OK user 2 per 0 MINUTE left 2 reset 0s",
		},
		{
			"a rate below 1 is not 0", 0, "edge", 1,
			descriptors{descriptor("generic_key=tenth")},
			"OK: OK tenth 1 per 10 MINUTE left 2 reset 10m0s",
		},
		{"shadow", 0, "edge", 2, descriptors{descriptor("generic_key=tried")}, "OK: OK tried 1 per 0 HOUR left 0 reset 0s"},
		{
			"hits that are known after the work", 0, "spent", 1500,
			descriptors{descriptor("tenant=acme", "model=m")},
			"OK: OK tokens 1000 per 0 HOUR left 0 reset 1h30m0s",
		},
		{
			"are owed", 0, "edge", 0,
			descriptors{descriptor("tenant=acme", "model=m")},
			"OVER_LIMIT: OVER_LIMIT tokens 1000 per 0 HOUR left 0 reset 30m3.6s",
		},
		{
			"a refused call gives nothing back", 0, "edge", 700,
			descriptors{negative(descriptor("tenant=acme", "model=m")), descriptor("user=dan", "plan=pro")},
			"OVER_LIMIT: OK tokens 1000 per 0 HOUR left 0 reset 1h30m0s; OVER_LIMIT user 10 per 0 MINUTE left 0 reset 0s",
		},
		{
			"and given back", 0, "edge", 0,
			descriptors{withHits(negative(descriptor("tenant=acme", "model=m")), 700), descriptor("user=dan", "plan=pro")},
			"OK: OK tokens 1000 per 0 HOUR left 200 reset 48m0s; OK user 10 per 0 MINUTE left 9 reset 6s",
		},
		{
			"an override", 0, "any", 4,
			descriptors{overridden(5, typev3.RateLimitUnit_HOUR, "user=eve")},
			"OK: OK override.5.hour 5 per 0 HOUR left 1 reset 59m40s",
		},
		{
			"its windows begin as in the reference server", 59*time.Minute + 39*time.Second, "any", 2,
			descriptors{overridden(5, typev3.RateLimitUnit_HOUR, "user=eve")},
			"OVER_LIMIT: OVER_LIMIT override.5.hour 5 per 0 HOUR left 0 reset 1s",
		},
		{
			"an override of an address", 0, "any", 5,
			descriptors{overridden(5, typev3.RateLimitUnit_HOUR, "masked_remote_address=2001:db8::1/128")},
			"OK: OK override.5.hour 5 per 0 HOUR left 0 reset 1s",
		},
		{
			"whose windows are of a client, too", 0, "any", 1,
			descriptors{overridden(5, typev3.RateLimitUnit_HOUR, "masked_remote_address=2001:db8::/64")},
			"OVER_LIMIT: OVER_LIMIT override.5.hour 5 per 0 HOUR left 0 reset 1s",
		},
		{
			"an override may name several units", 0, "any", 4,
			descriptors{times(30, overridden(5, typev3.RateLimitUnit_SECOND, "user=fay"))},
			"OK: OK override.5.30second 5 per 30 SECOND left 1 reset 1s",
		},
		{
			"and has windows of its own", 0, "any", 5,
			descriptors{overridden(5, typev3.RateLimitUnit_SECOND, "user=fay")},
			"OK: OK override.5.second 5 per 0 SECOND left 0 reset 1s",
		},
		{
			"two descriptors of one bucket, too costly only together", 0, "any", 3,
			descriptors{
				overridden(5, typev3.RateLimitUnit_DAY, "user=gus"), descriptor("path=/"),
				overridden(5, typev3.RateLimitUnit_DAY, "user=gus"), overridden(5, typev3.RateLimitUnit_DAY, "user=hal"),
			},
			"OVER_LIMIT: OVER_LIMIT override.5.day 5 per 0 DAY left 0 reset 0s; OK; " +
				"OVER_LIMIT override.5.day 5 per 0 DAY left 0 reset 0s; OK override.5.day 5 per 0 DAY left 5 reset 0s",
		},
		{
			"an override of nothing", 0, "any", 0,
			descriptors{overridden(0, typev3.RateLimitUnit_DAY, "user=eve")},
			"OVER_LIMIT: OVER_LIMIT override.0.day 0 per 0 DAY left 0 reset 0s",
		},
	} {
		*s.now = s.now.Add(step.after)
		_, got := s.ask(step.domain, step.hits, step.descriptors...)
		require.Equal(t, step.want, got, step.name)
	}
}

func negative(d *commonv3.RateLimitDescriptor) *commonv3.RateLimitDescriptor {
	d.IsNegativeHits = true
	return d
}

// times returns d with an override for so many of its units.
func times(n uint32, d *commonv3.RateLimitDescriptor) *commonv3.RateLimitDescriptor {
	d.Limit.UnitMultiplier = wrapperspb.UInt32(n)
	return d
}

func overridden(n uint32, unit typev3.RateLimitUnit, entries ...string) *commonv3.RateLimitDescriptor {
	d := descriptor(entries...)
	d.Limit = &commonv3.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: n, Unit: unit}
	return d
}

// TestRefusalsAndFailures expects that a refusal tells clients of the gateway when to come back, and that a failure is
// an error, and no answer that a gateway could take for an admission.
func TestRefusalsAndFailures(t *testing.T) {
	t.Parallel()
	s := newService(t)
	admitted, _ := s.ask("edge", 2, descriptor("user=ada"))
	require.Empty(t, admitted.GetResponseHeadersToAdd())
	refused, _ := s.ask("edge", 1, descriptor("user=ada"))
	require.Len(t, refused.GetResponseHeadersToAdd(), 1)
	require.Equal(t, "retry-after", refused.GetResponseHeadersToAdd()[0].GetKey())
	require.Equal(t, "30", refused.GetResponseHeadersToAdd()[0].GetValue())
	*s.now = s.now.Add(time.Millisecond)
	refused, _ = s.ask("edge", 1, descriptor("user=ada"))
	require.Equal(t, "30", refused.GetResponseHeadersToAdd()[0].GetValue(), "rounded up")
	_, _ = s.ask("edge", 3, descriptor("remote_address=192.0.2.7"))
	refused, statuses := s.ask("edge", 1, descriptor("remote_address=192.0.2.7", "user=ada"))
	require.Equal(t, "30", refused.GetResponseHeadersToAdd()[0].GetValue(), "the longest wait of those that refuse")
	require.Equal(t, "OVER_LIMIT: OVER_LIMIT user 2 per 0 MINUTE left 0 reset 29.999s", statuses)
	require.NoError(t, s.limiter.Close(t.Context()))
	_, err := s.ShouldRateLimit(t.Context(), &ratelimitv3.RateLimitRequest{Domain: "edge", Descriptors: descriptors{descriptor("user=ada")}})
	require.Equal(t, codes.Unavailable, status.Code(err))
	_, statuses = s.ask("edge", 1, descriptor("generic_key=tried"))
	require.Equal(t, "OK: OK", statuses, "a limit in shadow refuses no call, not even by a failure")
}

// TestMisuse expects that no call shares a bucket by mistake, that sizes are bounded, that no error tells a value, and
// that mistakes of Envoy's configuration are counted, and not logged as failures.
func TestMisuse(t *testing.T) {
	t.Parallel()
	many := make([]string, 1000)
	for i := range many {
		many[i] = "key" + strconv.Itoa(i) + "=secret"
	}
	for _, c := range []struct {
		domain       string
		descriptors  descriptors
		want, result string
	}{
		{"", descriptors{descriptor("user=secret")}, "rate limit domain must not be empty", "bad_request"},
		{"edge", nil, "rate limit descriptor list must not be empty", "bad_request"},
		{"edge", descriptors{descriptor("model=secret")}, `descriptor 0: ratelimit: invalid key: the key of "tokens" needs the attribute "tenant"`, "bad_key"},
		{"edge", descriptors{descriptor("remote_address=secret")}, `the attribute "remote_address", which is not one IP address`, "bad_key"},
		{"any", descriptors{overridden(1, typev3.RateLimitUnit_DAY, "remote_address=secret")}, `the entry "remote_address" is not one IP address`, "bad_key"},
		{"edge", descriptors{withHits(negative(descriptor("user=secret")), 1<<60)}, "cost exceeds capacity", "too_costly"},
		{"edge", descriptors{descriptor("user=secret", "user=b")}, `descriptor 0 has two entries "user"`, "bad_request"},
		{"edge", descriptors{descriptor(many...)}, "descriptor 0 has 1000 entries; send up to 64", "bad_request"},
		{"edge", slices.Repeat(descriptors{descriptor()}, 65), "the call has 65 descriptors; send up to 64", "bad_request"},
		{"edge", descriptors{descriptor("user=" + strings.Repeat("secret", 1000))}, "at most 256 fit", "bad_key"},
		{"edge", descriptors{overridden(1, typev3.RateLimitUnit_UNKNOWN, "user=secret")}, "the override has the unit UNKNOWN", "bad_request"},
		{"any", descriptors{times(101, overridden(1, typev3.RateLimitUnit_YEAR, "user=secret"))}, "is 101 times a year; use up to 100 years", "bad_request"},
		{
			"edge",
			descriptors{descriptor("user=secret", "plan=pro"), descriptor("user=secret")},
			`one bucket of "user" on the plans "pro" and ""`, "bad_request",
		},
	} {
		s := newService(t)
		_, err := s.ShouldRateLimit(t.Context(), &ratelimitv3.RateLimitRequest{Domain: c.domain, Descriptors: c.descriptors})
		require.Equal(t, codes.InvalidArgument, status.Code(err), c.want)
		require.ErrorContains(t, err, c.want)
		require.NotContains(t, err.Error(), "secret")
		require.Equal(t, "answered "+c.result+"\n", s.log.String())
	}
}

// TestSlots expects that a rule of a kind that Envoy can't use is a failure, and that the log says so.
func TestSlots(t *testing.T) {
	t.Parallel()
	s := newService(t)
	_, err := s.ShouldRateLimit(t.Context(), &ratelimitv3.RateLimitRequest{
		Domain: "edge", Descriptors: descriptors{descriptor("generic_key=held")},
	})
	require.Equal(t, codes.Unavailable, status.Code(err))
	require.Contains(t, s.log.String(), `the limit \"held\" has slots`)
	require.Contains(t, s.log.String(), "answered failed_closed")
}

func TestNew(t *testing.T) {
	t.Parallel()
	limiter, edge := ratelimittest.New(t, nil), map[string]rls.Domain{"edge": {Site: &rules.Site{}}}
	did := func(_ *rls.Service, err error) error { return err }
	for says, err := range map[string]error{
		"the limiter is nil":     did(rls.New(nil, rls.Config{Domains: edge})),
		"field Domains is empty": did(rls.New(limiter, rls.Config{})),
		`domain ""`:              did(rls.New(limiter, rls.Config{Domains: map[string]rls.Domain{"": {Site: &rules.Site{}}}})),
		`domain "edge"`:          did(rls.New(limiter, rls.Config{Domains: map[string]rls.Domain{"edge": {}}})),
	} {
		require.ErrorIs(t, err, rls.ErrInvalidConfig, says)
		require.ErrorContains(t, err, says)
	}
}

// TestUnlimitedCallsAreReported promises an event for each call that passes without a limit, and a warning for each
// unknown domain and each set of entries, up to a bound, without values.
func TestUnlimitedCallsAreReported(t *testing.T) {
	t.Parallel()
	s := newService(t)
	ask := func(domain string, descriptors ...*commonv3.RateLimitDescriptor) {
		response, _ := s.ask(domain, 0, descriptors...)
		require.Equal(t, ratelimitv3.RateLimitResponse_OK, response.GetOverallCode())
	}
	for range 2 {
		ask("egde", descriptor("remote_address=10.0.0.1"))
		ask("edge", descriptor("remote_addr=10.0.0.1"))
		ask("edge", descriptor("user=ada"), descriptor("remote_addr=10.0.0.1"))
	}
	unlimited := slices.DeleteFunc(slices.Clone(s.answered), func(a event.Answered) bool { return a.Result != "unlimited" })
	require.Len(t, unlimited, 6)
	require.Equal(t, event.Answered{Route: "egde", Result: "unlimited"}, unlimited[0])
	require.Equal(t, 2, strings.Count(s.log.String(), "level=WARN"), s.log.String())
	require.Contains(t, s.log.String(), "domain=egde domains=\"[edge spent]\"")
	require.Contains(t, s.log.String(), "domain=edge entries=[remote_addr]")
	require.NotContains(t, s.log.String(), "10.0.0.1")
	for i := range 200 {
		ask("domain"+strconv.Itoa(i), descriptor("user=ada"))
	}
	require.Equal(t, 100, strings.Count(s.log.String(), "level=WARN"))
}

type observer func(event.Event)

func (o observer) Observe(_ context.Context, e event.Event) { o(e) }
