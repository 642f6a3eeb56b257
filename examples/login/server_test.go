package main

import (
	"crypto/sha256"
	"encoding/json"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/migrations"
)

// browser keeps cookies and follows redirects.
type browser struct {
	client *http.Client
	url    string
}

func newBrowser(t *testing.T, b *bundle) *browser {
	t.Helper()
	listening := httptest.NewServer(b.handler)
	t.Cleanup(listening.Close)
	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	client := listening.Client()
	client.Jar = jar
	return &browser{client: client, url: listening.URL}
}

func (b *browser) send(t *testing.T, method, path string, form url.Values) (status int, page string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, b.url+path, strings.NewReader(form.Encode()))
	require.NoError(t, err)
	if form != nil {
		request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	request.Header.Set("Accept", "text/html,application/xhtml+xml,*/*;q=0.8")
	response, err := b.client.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(body)
}

func (b *browser) signIn(t *testing.T, login, password string) (status int, page string) {
	t.Helper()
	return b.send(t, http.MethodPost, "/login", url.Values{"login": {login}, "password": {password}})
}

func TestBrowser(t *testing.T) {
	t.Parallel()

	t.Run("MistypesSignsInAndSignsOut", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		visitor := newBrowser(t, b)
		status, page := visitor.send(t, http.MethodGet, "/", nil)
		require.Equal(t, http.StatusOK, status)
		require.Contains(t, page, `<form method="post" action="/login">`)

		status, page = visitor.signIn(t, "Ada", "oops")
		require.Equal(t, http.StatusUnauthorized, status)
		require.Contains(t, page, "The login or the password is wrong.")
		require.Contains(t, page, `value="Ada"`)

		status, page = visitor.signIn(t, "Ada", passwordOf("ada"))
		require.Equal(t, http.StatusOK, status)
		require.Contains(t, page, "You are <strong>ada</strong>")
		require.Equal(t, 1, b.sessions(t))

		status, page = visitor.send(t, http.MethodPost, "/logout", url.Values{})
		require.Equal(t, http.StatusOK, status)
		require.NotContains(t, page, "ada")
		require.Zero(t, b.sessions(t))
	})

	t.Run("IsToldHowLongToWait", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		visitor := newBrowser(t, b)
		for range 5 {
			visitor.signIn(t, "ada", "oops")
		}
		status, page := visitor.signIn(t, "ada", passwordOf("ada"))
		require.Equal(t, http.StatusTooManyRequests, status)
		require.Contains(t, page, "The password was not checked.")
		require.Contains(t, page, "Try again in 3 minutes.")

		b.clock.Advance(2*time.Minute + 1)
		_, page = visitor.signIn(t, "ada", passwordOf("ada"))
		require.Contains(t, page, "Try again in 60 seconds.")
	})

	t.Run("CannotBeMadeToRunAScript", func(t *testing.T) {
		t.Parallel()
		visitor := newBrowser(t, setup(t))
		_, page := visitor.signIn(t, `"><script>alert(1)</script>`, "oops")
		require.NotContains(t, page, "<script>")
		require.Contains(t, page, "&lt;script&gt;")
	})

	t.Run("IsSignedOutWhenTheSessionExpires", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		visitor := newBrowser(t, b)
		visitor.signIn(t, "ada", passwordOf("ada"))
		_, page := visitor.send(t, http.MethodGet, "/", nil)
		require.Contains(t, page, "You are")
		b.exec(t, `UPDATE login.sessions SET expires_at = now()`)
		_, page = visitor.send(t, http.MethodGet, "/", nil)
		require.NotContains(t, page, "You are")
	})

	t.Run("KeepsATokenThatTheDatabaseDoesNotHave", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		cookies := b.from(here, "ada", passwordOf("ada")).Result().Cookies()
		require.Len(t, cookies, 1)
		require.True(t, cookies[0].HttpOnly)
		require.Equal(t, http.SameSiteLaxMode, cookies[0].SameSite)
		var stored []byte
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT token_hash FROM login.sessions`).Scan(&stored))
		sum := sha256.Sum256([]byte(cookies[0].Value))
		require.Equal(t, sum[:], stored)
		require.NotContains(t, string(stored), cookies[0].Value)
	})
}

func TestServer(t *testing.T) {
	t.Parallel()

	t.Run("RefusesWithSecondsRoundedUp", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		for range 5 {
			b.from(here, "ada", wrongPassword)
		}
		b.clock.Advance(500 * time.Millisecond)
		refused := b.from(here, "ada", passwordOf("ada"))
		require.Equal(t, http.StatusTooManyRequests, refused.Code)
		require.Equal(t, "180", refused.Header().Get("Retry-After")) // 179.5
		require.Equal(t, "no-store", refused.Header().Get("Cache-Control"))
		require.Equal(t, "application/problem+json", refused.Header().Get("Content-Type"))
		var body problem
		require.NoError(t, json.Unmarshal(refused.Body.Bytes(), &body))
		require.Equal(t, problem{
			Title:      "Too many attempts",
			Status:     http.StatusTooManyRequests,
			Detail:     "There were too many attempts to sign in to this account or from your network. The password was not checked.",
			RetryAfter: 180,
		}, body)

		b.clock.Advance(180 * time.Second)
		require.Equal(t, http.StatusOK, b.from(here, "ada", passwordOf("ada")).Code)
	})

	t.Run("AnswersInTheLanguageOfTheClient", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		for _, tt := range []struct{ contentType, accept, body, want string }{
			{"application/json", "", `{"login": "ada", "password": "oops"}`, "application/problem+json"},
			{"application/json; charset=utf-8", "*/*", `{"login": "ada", "password": "oops"}`, "application/problem+json"},
			{"application/x-www-form-urlencoded", "application/json", "login=ada&password=oops", "application/problem+json"},
			{"application/x-www-form-urlencoded", "text/html, */*", "login=ada&password=oops", "text/html; charset=utf-8"},
			{"application/x-www-form-urlencoded", "", "login=ada&password=oops", "text/html; charset=utf-8"},
		} {
			request := httptest.NewRequest(http.MethodPost, "/login", strings.NewReader(tt.body))
			request.Header.Set("Content-Type", tt.contentType)
			request.Header.Set("Accept", tt.accept)
			answered := b.serve(here, request)
			require.Equal(t, http.StatusUnauthorized, answered.Code, tt)
			require.Equal(t, tt.want, answered.Header().Get("Content-Type"), tt)
		}
	})

	t.Run("RefusesWhatIsNotASignIn", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		for _, body := range []string{
			``, `{`, `[]`, `{"login": "ada"}`, `{"login": " ", "password": "x"}`, `{"login": "a\u0000", "password": "x"}`,
			`{"login": "ada", "password": "` + strings.Repeat("x", 1025) + `"}`, strings.Repeat(" ", maxBodyBytes+1) + `{}`,
		} {
			request := httptest.NewRequest(http.MethodPost, "/login", strings.NewReader(body))
			request.Header.Set("Content-Type", "application/json")
			require.Equal(t, http.StatusBadRequest, b.serve(here, request).Code, body)
		}
		require.Empty(t, b.table(t))
		require.Zero(t, b.hashes())
	})

	t.Run("RefusesFormsOfOtherSites", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		for name, value := range map[string]string{"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"} {
			request := httptest.NewRequest(http.MethodPost, "/login", strings.NewReader("login=ada&password="+url.QueryEscape(passwordOf("ada"))))
			request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			request.Header.Set(name, value)
			require.Equal(t, http.StatusForbidden, b.serve(here, request).Code, name)
		}
		require.Empty(t, b.table(t))
		require.Zero(t, b.sessions(t))
	})
}

func TestServerFailsClosed(t *testing.T) {
	t.Parallel()

	refused := func(t *testing.T, b *bundle) {
		t.Helper()
		failed := b.from(here, "ada", passwordOf("ada"))
		require.Equal(t, http.StatusServiceUnavailable, failed.Code)
		require.Equal(t, "5", failed.Header().Get("Retry-After"))
		require.Empty(t, failed.Result().Cookies())
		require.NotContains(t, failed.Body.String(), "SQLSTATE")
	}

	t.Run("WhenTheLimitsCannotBeAsked", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		require.NoError(t, migrations.Down(t.Context(), b.pool, migrations.Config{}))
		refused(t, b)
		require.Zero(t, b.hashes(), "a password was looked at without a limit")
		require.Zero(t, b.sessions(t))
	})

	t.Run("WhenTheUsersCannotBeRead", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		b.exec(t, `ALTER TABLE login.users RENAME TO gone`)
		refused(t, b)
	})

	t.Run("WhenTheServerIsDownAndUntilItIsUp", func(t *testing.T) {
		t.Parallel()
		testsize.Long(t, "starts a server of its own")
		own := postgrestest.StartOwn(t, nil)
		db, err := postgrestest.NewScratch(t.Context(), own.URL(), "login_demo", poolSize)
		require.NoError(t, err)
		t.Cleanup(db.Pool.Close)
		require.NoError(t, migrate(t.Context(), db.Pool))
		b := setupOn(t, db.Pool)
		require.Equal(t, http.StatusUnauthorized, b.from(here, "ada", wrongPassword).Code)

		require.NoError(t, own.Stop(t.Context(), postgrestest.Immediate))
		refused(t, b)
		require.NoError(t, own.Restart(t.Context()))
		require.Eventually(t, func() bool {
			return b.from(here, "ada", passwordOf("ada")).Code == http.StatusOK
		}, patience, 10*time.Millisecond)
	})
}
