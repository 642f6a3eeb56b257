package cli_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/cli"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

const token = "0123456789abcdef0123456789abcdef"

// served is a running ratelimit serve with TLS and a token.
type served struct {
	t         *testing.T
	f         *fixture
	scheme    string
	web, grpc string
	tls       *tls.Config
	client    *http.Client
	stop      func() (code int, log string)
}

func serveOn(t *testing.T, f *fixture) *served {
	t.Helper()
	certificate, key, pool := selfSigned(t)
	s := &served{t: t, f: f, scheme: "https://", tls: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}}
	s.start(
		"--domain", "edge", "--charged-domain", "spent", "--attribute", "model",
		"--token-file", file(t, "tokens", token+"\n"), "--tls-cert", file(t, "cert.pem", certificate), "--tls-key", file(t, "key.pem", key),
		"--hash-key-file", file(t, "secret", "a secret of some length"), "--drain", "1ms",
	)
	return s
}

// start runs serve with flags.
func (s *served) start(flags ...string) {
	t, f := s.t, s.f
	t.Helper()
	transport := &http.Transport{TLSClientConfig: s.tls}
	s.client = &http.Client{Transport: transport}
	args := append([]string{"serve", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"}, flags...)
	used.note(args)
	ctx, cancel := context.WithCancel(t.Context())
	reader, writer := io.Pipe()
	ended := make(chan int, 1)
	go func() {
		code := cli.Run(ctx, args, strings.NewReader(""), io.Discard, writer, func(name string) string { return variable(f.env, name) })
		_ = writer.Close()
		ended <- code
	}()
	lines := bufio.NewReader(reader)
	var listening struct{ Msg, HTTP, GRPC string }
	for listening.Msg != "serve: listening" { // loads of rules may be logged before
		line, err := lines.ReadString('\n')
		require.NoError(t, err, line)
		require.NoError(t, json.Unmarshal([]byte(line), &listening), line)
	}
	s.web, s.grpc = listening.HTTP, listening.GRPC
	rest := make(chan string, 1)
	go func() {
		text, _ := io.ReadAll(lines)
		rest <- string(text)
	}()
	s.stop = func() (int, string) {
		transport.CloseIdleConnections()
		cancel()
		return <-ended, <-rest
	}
}

// selfSigned returns the certificate of net/http/httptest, which is for 127.0.0.1.
func selfSigned(t *testing.T) (certificate, key string, pool *x509.CertPool) {
	t.Helper()
	server := httptest.NewTLSServer(http.NotFoundHandler())
	defer server.Close()
	der, err := x509.MarshalPKCS8PrivateKey(server.TLS.Certificates[0].PrivateKey)
	require.NoError(t, err)
	pool = x509.NewCertPool()
	pool.AddCert(server.Certificate())
	certificate = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	return certificate, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})), pool
}

// do sends a request and returns the status, the body and the content type. Each header is a name and a value.
func (s *served) do(method, path, authorization string, body io.Reader, headers ...string) (code int, text, contentType string) {
	s.t.Helper()
	r, err := http.NewRequestWithContext(s.t.Context(), method, s.scheme+s.web+path, body)
	require.NoError(s.t, err)
	if authorization != "" {
		r.Header.Set("Authorization", authorization)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	if host := r.Header.Get("Host"); host != "" {
		r.Host = host
	}
	response, err := s.client.Do(r)
	require.NoError(s.t, err)
	defer response.Body.Close()
	all, err := io.ReadAll(response.Body)
	require.NoError(s.t, err)
	return response.StatusCode, string(all), response.Header.Get("Content-Type")
}

// post makes a call to the API, and requires a status.
func (s *served) post(verb, body string, want int) (answer map[string]any) {
	s.t.Helper()
	code, text, contentType := s.do(http.MethodPost, "/v1/"+verb, "Bearer "+token, strings.NewReader(body))
	require.Equal(s.t, want, code, "%.200s: %s", body, text)
	require.NoError(s.t, json.Unmarshal([]byte(text), &answer), text)
	require.Equal(s.t, map[bool]string{true: "application/json", false: "application/problem+json"}[code == http.StatusOK], contentType)
	return answer
}

func TestServe(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, weekly("messages", "", 3), weekly("messages", "pro", 50), weekly("tokens", "", 1000),
		rules.Rule{Limit: "mails", Policy: ratelimit.SlidingWindow{Rate: 3, Period: time.Minute}})
	_, err := f.store.Apply(t.Context(), rules.Edit{Author: "eve", Reason: "a test"}, rules.Changes{Tiers: &rules.TierSet{Tiers: []rules.Tier{
		{Limit: "messages", Key: "{user}", When: map[string]string{"user": "*"}},
		{Limit: "tokens", Key: "{model}", When: map[string]string{"model": "*"}},
	}}})
	require.NoError(t, err)
	s := serveOn(t, f)

	answer := s.post("take", `{"requests":[{"limit":"messages","key":"ada","cost":2}]}`, http.StatusOK)
	require.Equal(t, true, answer["allowed"])
	require.InDelta(t, 1, answer["limits"].([]any)[0].(map[string]any)["remaining"], 0)
	answer = s.post("take", `{"requests":[{"limit":"messages","key":"ada","cost":2}]}`, http.StatusTooManyRequests)
	require.Equal(t, []any{"messages"}, answer["violated-policies"])
	require.Positive(t, answer["retry_after_ms"])
	require.InDelta(t, http.StatusTooManyRequests, answer["status"], 0)
	refused := answer
	answer = s.post("check", `{"requests":[{"limit":"messages","key":"ada","cost":2}]}`, http.StatusOK)
	for _, field := range []string{"allowed", "limits", "retry_after_ms"} { // of which the last falls from answer to answer
		require.Contains(t, refused, field)
	}
	require.Equal(t, false, answer["allowed"])
	require.Equal(t, false, refused["allowed"])
	require.InDelta(t, 1, refused["limits"].([]any)[0].(map[string]any)["remaining"], 0)
	s.post("take", `{"requests":[{"limit":"messages","key":"bob","cost":20,"plan":"pro"}]}`, http.StatusOK)

	answer = s.post("reserve", `{"requests":[{"limit":"tokens","global":true,"cost":900}]}`, http.StatusOK)
	id := answer["id"].(string)
	settle := `{"id":"` + id + `","requests":[{"limit":"tokens","global":true,"cost":100}]}`
	for _, repeated := range []string{settle, strings.Replace(settle, `"cost":100`, `"cost":1`, 1)} {
		require.Equal(t, map[string]any{"allowed": true}, s.post("settle", repeated, http.StatusOK))
	}
	s.post("take", `{"requests":[{"limit":"tokens","global":true,"cost":900}]}`, http.StatusOK)
	s.post("settle", `{"requests":[{"limit":"tokens","global":true}]}`, http.StatusBadRequest)
	s.post("settle", `{"id":"5d3ed9ba-3c44-4a87-9a1c-000000000000"}`, http.StatusNotFound)

	s.post("reserve", `{"requests":[{"limit":"mails","key":"ada"}]}`, http.StatusBadRequest) // of a kind without reservations
	s.post("reserve", `{"requests":[{"limit":"mail","key":"ada"}]}`, http.StatusBadRequest)

	s.gateway(t)

	code, text, _ := s.do(http.MethodGet, "/metrics", "Bearer "+token, nil)
	require.Equal(t, http.StatusOK, code)
	require.Contains(t, text, `ratelimit_requests_total{cached="false",kind="fixed_window",limit="messages",result="allowed",verb="take"}`)
	require.Contains(t, text, `ratelimit_answers_total{limit="mails",result="bad_request",route="POST /v1/reserve"} 1`)
	require.NotContains(t, text, `failed_closed`)
	code, text, _ = s.do(http.MethodGet, "/limits/", "Basic "+basic(token), nil)
	require.Equal(t, http.StatusOK, code)
	require.Contains(t, text, "messages")
	code, text, _ = s.do(http.MethodGet, "/healthz", "", nil)
	require.Equal(t, http.StatusOK, code, text)

	s.attacks(t)
	code, log := s.stop()
	require.Equal(t, 0, code)
	for line := range strings.Lines(log) {
		require.True(t, json.Valid([]byte(line)), line)
	}
	require.Contains(t, log, `"serve: stopped"`)
	require.NotContains(t, log, token)
	require.NotContains(t, log, "rate limits are not decided", "mistakes of clients are no failures")
	top, err := refusals.Top(t.Context(), f.pool, "", refusals.TopConfig{Limit: "messages"})
	require.NoError(t, err)
	require.Len(t, top, 1, "the counter wrote its last counts")
	require.GreaterOrEqual(t, top[0].Refused, int64(2))
	var allowed int64
	require.NoError(t, f.pool.QueryRow(t.Context(), `SELECT sum(allowed) FROM ratelimit.refusals WHERE name = 'messages'`).Scan(&allowed))
	require.Positive(t, allowed)
}

func basic(password string) string {
	r := &http.Request{Header: http.Header{}}
	r.SetBasicAuth("eve", password)
	return strings.TrimPrefix(r.Header.Get("Authorization"), "Basic ")
}

// TestServeAnswersNoOtherSite expects that pages of other sites neither change nor read anything through an operator's
// browser.
func TestServeAnswersNoOtherSite(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, weekly("messages", "", 3))
	const take = `{"requests":[{"limit":"messages","key":"ada","cost":3}]}`
	evil := "https://evil.example"
	forms := [][]string{
		{"Origin", evil, "Sec-Fetch-Site", "cross-site"}, {"Sec-Fetch-Site", "same-site"}, {"Origin", evil}, {"Origin", "null"},
	}
	withTokens := serveOn(t, f)
	without := &served{t: t, f: f, scheme: "http://"}
	without.start("--host", "Proxy.example.")
	_, port, err := net.SplitHostPort(without.web)
	require.NoError(t, err)
	for s, authorization := range map[*served]string{withTokens: "Basic " + basic(token), without: ""} {
		for _, headers := range forms {
			for _, path := range []string{"/v1/take", "/v1/check", "/limits/reset"} {
				code, text, _ := s.do(http.MethodPost, path, authorization, strings.NewReader(take), append(headers, "Content-Type", "text/plain")...)
				require.Equal(t, http.StatusForbidden, code, "%v %s", headers, text)
			}
		}
		for _, headers := range [][]string{{}, {"Origin", s.scheme + s.web}, {"Sec-Fetch-Site", "same-origin"}} {
			code, text, _ := s.do(http.MethodPost, "/v1/check", authorization, strings.NewReader(take), headers...)
			require.Equal(t, http.StatusOK, code, "%v %s", headers, text)
			require.Contains(t, text, `"allowed":true`, "nothing was taken")
		}
	}
	for host, want := range map[string]int{
		"evil.example": 421, "evil.example:" + port: 421, "127.0.0.1.evil.example": 421, "localhost.evil.example": 421, "10.0.0.1": 421,
		"0.0.0.0": 421, "localhost:" + port: 200, "LOCALHOST.": 200, "127.0.0.1": 200, "127.8.9.1:80": 200, "[::1]": 200, "[::1]:" + port: 200,
		"[::ffff:127.0.0.1]:80": 200, "Proxy.example:443": 200,
	} {
		for _, path := range []string{"/limits/", "/metrics", "/healthz"} {
			code, text, _ := without.do(http.MethodGet, path, "", nil, "Host", host)
			require.Equal(t, map[bool]int{true: 200, false: want}[path == "/healthz"], code, "%s%s %s", host, path, text)
		}
	}
	code, _, _ := withTokens.do(http.MethodGet, "/metrics", "Bearer "+token, nil, "Host", "service.example")
	require.Equal(t, http.StatusOK, code)
	for _, s := range []*served{withTokens, without} {
		code, log := s.stop()
		require.Equal(t, 0, code, log)
	}
}

// gateway asks as Envoy does. A rule that changes while the server runs decides.
func (s *served) gateway(t *testing.T) {
	t.Helper()
	conn, err := grpc.NewClient(s.grpc, grpc.WithTransportCredentials(credentials.NewTLS(s.tls)))
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	gateway := ratelimitv3.NewRateLimitServiceClient(conn)
	with := metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+token)
	ask := func(ctx context.Context, domain, key, value string, hits uint32) (ratelimitv3.RateLimitResponse_Code, error) {
		r, err := gateway.ShouldRateLimit(ctx, &ratelimitv3.RateLimitRequest{Domain: domain, HitsAddend: hits, Descriptors: []*commonv3.RateLimitDescriptor{
			{Entries: []*commonv3.RateLimitDescriptor_Entry{{Key: key, Value: value}}},
		}})
		return r.GetOverallCode(), err
	}
	for _, c := range []struct {
		domain, key, value string
		hits               uint32
		want               ratelimitv3.RateLimitResponse_Code
	}{
		{"edge", "user", "cyd", 3, ratelimitv3.RateLimitResponse_OK},
		{"edge", "user", "cyd", 1, ratelimitv3.RateLimitResponse_OVER_LIMIT},
		{"other", "user", "cyd", 1, ratelimitv3.RateLimitResponse_OK},
		{"spent", "model", "large", 4000, ratelimitv3.RateLimitResponse_OK},
		{"edge", "model", "large", 1, ratelimitv3.RateLimitResponse_OVER_LIMIT},
	} {
		got, err := ask(with, c.domain, c.key, c.value, c.hits)
		require.NoError(t, err)
		require.Equal(t, c.want, got, c)
	}
	s.f.put(t, weekly("messages", "", 5))
	require.Eventually(t, func() bool {
		got, err := ask(with, "edge", "user", "dan", 4)
		return err == nil && got == ratelimitv3.RateLimitResponse_OK
	}, time.Minute, 10*time.Millisecond)
	for _, authorization := range []string{"", "Bearer wrong", "Basic " + basic(token)} {
		_, err := ask(metadata.AppendToOutgoingContext(t.Context(), "authorization", authorization), "edge", "user", "cyd", 1)
		require.Equal(t, codes.Unauthenticated, status.Code(err), authorization)
	}
	alive, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{})
	require.NoError(t, err)
	require.Equal(t, healthv1.HealthCheckResponse_SERVING, alive.GetStatus())
}

// attacks expects that hostile requests are refused or bounded, and that no answer tells a key or a token.
func (s *served) attacks(t *testing.T) {
	t.Helper()
	for _, authorization := range []string{"", "Bearer", "Bearer " + token + "0", "Bearer " + token[1:], "Basic " + basic("wrong"), "Digest " + token} {
		for _, path := range []string{"/v1/take", "/metrics", "/limits/", "/nothing"} {
			code, text, _ := s.do(http.MethodPost, path, authorization, strings.NewReader("{}"))
			require.Equal(t, http.StatusUnauthorized, code, "%s %s", path, authorization)
			require.NotContains(t, text, token)
		}
	}
	for _, c := range []struct {
		body string
		code int
		want string
	}{
		{strings.Repeat(" ", 10<<20), http.StatusRequestEntityTooLarge, "65536 bytes"},
		{``, http.StatusBadRequest, "the body is empty or ends early"},
		{`{"requests":`, http.StatusBadRequest, "the body is empty or ends early"},
		{`{"requests":]`, http.StatusBadRequest, "the body is not JSON: invalid character ']'"},
		{`[]`, http.StatusBadRequest, "the body: it is not an object"},
		{`{"requests":{}}`, http.StatusBadRequest, `the body: "requests" is {}; write a list`},
		{`{"requests":[{"limit":5}]}`, http.StatusBadRequest, `request 0: "limit" is 5; write a text in quotes`},
		{`{"requests":[{"cost":"5"}]}`, http.StatusBadRequest, `request 0: "cost" is "5"; write a number`},
		{`{"requests":[{"global":1}]}`, http.StatusBadRequest, `request 0: "global" is 1; write true or false`},
		{`{"requests":[]}{}`, http.StatusBadRequest, "there is more after the object"},
		{`{"requests":[{"limit":"messages","key":"ada","costs":1}]}`, http.StatusBadRequest, `request 0: "costs" is no field of a request; there are limit, key, address, global, cost, plan`},
		{`{"requests":[]}}`, http.StatusBadRequest, "there is more after the object"},
		{`{"requests":[{"limit":"messages","key":"ada"}],"requests":[]}`, http.StatusBadRequest, `"requests" is given twice; keep one`},
		{`{"requests":[{"limit":"messages","key":"ada","key":"bob"}]}`, http.StatusBadRequest, `request 0: "key" is given twice; keep one`},
		{`{"requests":[{"limit":"messages","key":null,"key":"bob"}]}`, http.StatusBadRequest, `request 0: "key" is given twice; keep one`},
		{`{"requests":[{"limit":"messages","key":"ada","KEY":"bob"}]}`, http.StatusBadRequest, `request 0: "KEY" is no field of a request`},
		{`{"Requests":[{"limit":"messages","key":"ada"}]}`, http.StatusBadRequest, `"Requests" is no field of a call; there are id, requests`},
		{`{"requests":[{"limit":"messages","key":"ada"},5]}`, http.StatusBadRequest, `request 1: it is not an object`},
		{`{"requests":[{"limit":"messages","key":"ada","cost":1e999}]}`, http.StatusBadRequest, `request 0: "cost" is 1e999; write a number`},
		{"{\"requests\":[{\"limit\":\"messages\",\"key\":\"\xff\"}]}", http.StatusBadRequest, "it is not UTF-8"},
		{"\ufeff{}", http.StatusBadRequest, "the body is not JSON: invalid character"},
		{strings.Repeat("[", 60_000), http.StatusBadRequest, ""},
		{`{"requests":[]}`, http.StatusBadRequest, "requests is missing or empty; name 1 to 64 limits"},
		{`{"requests":[{"limit":"nobody","key":"ada"}]}`, http.StatusBadRequest, "no rule is stored"},
		{`{"requests":[{"limit":"messages"}]}`, http.StatusBadRequest, "needs one of key, address, or global"},
		{`{"requests":[{"limit":"messages","key":"ada","global":true}]}`, http.StatusBadRequest, "needs one of key, address, or global"},
		{`{"requests":[{"limit":"messages","key":"ada","address":"10.0.0.1"}]}`, http.StatusBadRequest, "needs one of key, address, or global"},
		{`{"requests":[{"limit":"messages","address":"unknown"}]}`, http.StatusBadRequest, "the address is not one IP address"},
		{`{"requests":[{"limit":"messages","address":"2001:db8::1","cost":5}]}`, http.StatusOK, ""},
		{`{"requests":[{"limit":"messages","address":"[2001:db8::2]:80"}]}`, http.StatusTooManyRequests, "messages"}, // the same client
		{`{"requests":[{"limit":"messages","key":"ada","plan":"Pro"}]}`, http.StatusBadRequest, `no stored rule has the plan "Pro"; the rules have pro;`},
		{`{"requests":[{"limit":"tokens","key":"ada","plan":"pro"}]}`, http.StatusOK, ""}, // its rule is for all plans
		{`{"id":"x","requests":[{"limit":"messages","key":"ada"}]}`, http.StatusBadRequest, "only settle"},
		{`{"requests":[{"limit":"messages","key":"ada","cost":-1}]}`, http.StatusBadRequest, "a cost is a number from 0 up"},
		{`{"requests":[{"limit":"messages","key":"` + strings.Repeat("k", 60_000) + `"}]}`, http.StatusOK, ""}, // it is hashed
		{`{"requests":[{"limit":"messages","key":"ada","cost":1e9}]}`, http.StatusRequestEntityTooLarge, `allows at most 5`},
		{`{"requests":[` + strings.Repeat(`{"limit":"messages","key":"ada"},`, 999) + `{"limit":"messages","key":"ada"}]}`, http.StatusBadRequest, "1000 limits"},
	} {
		answer := s.post("take", c.body, c.code)
		if c.want != "" {
			require.Contains(t, answer["detail"], c.want)
		}
	}
	for path, want := range map[string]int{"/v1/take": http.StatusMethodNotAllowed, "/v1/give": http.StatusNotFound, "/": http.StatusNotFound} {
		code, text, contentType := s.do(http.MethodGet, path, "Bearer "+token, nil)
		require.Equal(t, want, code, path)
		require.Equal(t, "application/problem+json", contentType)
		require.Contains(t, text, "POST")
	}
	s.slowly(t)
}

// slowly sends half a request over a connection that stays open. The server answers others meanwhile.
func (s *served) slowly(t *testing.T) {
	t.Helper()
	slow, err := tls.Dial("tcp", s.web, s.tls)
	require.NoError(t, err)
	defer slow.Close()
	_, err = io.Copy(slow, bytes.NewReader([]byte("POST /v1/take HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n")))
	require.NoError(t, err)
	s.post("check", `{"requests":[{"limit":"messages","key":"zoe"}]}`, http.StatusOK)
}

// TestServeDoesNotStart expects advice for a used port and for an undeclared attribute.
func TestServeDoesNotStart(t *testing.T) {
	t.Parallel()
	f := setup(t)
	var config net.ListenConfig
	taken, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	address := taken.Addr().String()
	require.Contains(t, f.fails(t, 1, "serve", "--http", address), "--http is "+address+", which another program uses; choose another port with --http")
	for _, drain := range []string{"0", "0s", "2s"} {
		require.Contains(t, f.fails(t, 1, "serve", "--http", "127.0.0.1:0", "--grpc", address, "--drain", drain), "choose another port with --grpc")
	}

	f.put(t, weekly("messages", "", 3))
	_, err = f.store.Apply(t.Context(), rules.Edit{Author: "eve", Reason: "a test"}, rules.Changes{Tiers: &rules.TierSet{Tiers: []rules.Tier{
		{Limit: "messages", When: map[string]string{"region": "*"}},
	}}})
	require.NoError(t, err)
	require.Contains(t, f.fails(t, 2, "serve"), `the attribute "region"; there are user, tenant, plan, address, route; declare other entries of descriptors with --attribute`)
}
