// Command login is a sign-in with limits against password guessing.
//
//	export DATABASE_URL=postgres://localhost/postgres
//	go run . -add ada:secret     # adds an account
//	go run .                     # serves http://127.0.0.1:8080
//	curl -i http://127.0.0.1:8080/login -d login=ada -d password=guess
//
// A sign-in has three steps. It takes one token from each limit, in a call that commits. It checks the password,
// outside any transaction. If the password is right, one transaction creates the session and returns the tokens. The
// order matters: a program that charges the limit after a wrong password checks every guess that arrives before the
// first charge.
//
// If you add sign-up, password reset or one-time codes, limit them in the same way. HASH_KEY, a secret of at least 16
// bytes, keeps logins and addresses out of the limiter's table.
package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/crypto/bcrypt"
	"golang.org/x/text/unicode/norm"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/lockout"
)

var (
	// perAccount stops guesses at one password from many addresses: 5 at once, then one every 3 minutes.
	perAccount = ratelimit.Define("login.account", ratelimit.TokenBucket{Rate: 20, Period: time.Hour, Capacity: 5})
	// perClient stops one client that tries many accounts. An office behind one address shares it.
	perClient = ratelimit.Define("login.client", ratelimit.TokenBucket{Rate: 120, Period: time.Hour, Capacity: 30})
	// overall stops a botnet that tries many accounts. It refuses everybody when it is empty: set it far above your
	// busiest minute.
	overall = ratelimit.Define("login.all", ratelimit.TokenBucket{Rate: 300, Period: time.Minute, Capacity: 1000})
	// locked stops guesses at one password over days: it locks an account for 6 minutes, then 12, up to an hour.
	locked = lockout.Define("login.locked", lockout.Config{})
)

const (
	schema = `
CREATE TABLE IF NOT EXISTS login_users (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    login         text COLLATE "C" NOT NULL UNIQUE, -- as normalize returns it
    password_hash bytea NOT NULL
);
CREATE TABLE IF NOT EXISTS login_sessions (
    token_hash bytea PRIMARY KEY, -- of a token that only the browser has
    user_id    bigint NOT NULL REFERENCES login_users ON DELETE CASCADE,
    expires_at timestamptz NOT NULL
)`
	sessionLifetime = 12 * time.Hour
	maxLogin        = 254 // bytes of the longest mail address
	maxPassword     = 72  // bytes that bcrypt reads
)

// errRefused is returned for a wrong password and for an unknown account, so that a client cannot learn which accounts
// exist.
var errRefused = errors.New("the login or the password is wrong")

type app struct {
	pool    *pgxpool.Pool
	limiter *ratelimit.Limiter
	client  httplimit.Key // returns the client's address
	hashing chan struct{} // bounds the passwords that are checked at the same time
	decoy   []byte        // the hash that the password of an unknown account is checked against
}

func main() {
	listen := flag.String("listen", "127.0.0.1:8080", "`address` to listen on")
	proxies := flag.String("trusted-proxies", "", "`addresses` of the proxies in front of this server, for example "+
		"10.0.0.0/8,::1")
	add := flag.String("add", "", "add an account, as `login:password`, and exit")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *listen, *proxies, *add)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, listen, proxies, add string) error {
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, schema); err != nil {
		return err
	}
	if add != "" {
		login, password, ok := strings.Cut(add, ":")
		if !ok {
			return errors.New("-add takes login:password, such as ada:secret")
		}
		return addUser(ctx, pool, login, password)
	}
	var config ratelimit.Config
	if secret := os.Getenv("HASH_KEY"); secret != "" {
		config.HashKey = []byte(secret)
	}
	limiter, err := ratelimit.New(pool, config)
	if err != nil {
		return err
	}
	// clients can forge X-Forwarded-For, so it counts only if a proxy of ours sent it
	source := httplimit.Source(httplimit.Peer)
	if proxies != "" {
		trusted, err := httplimit.ParseProxies(strings.Split(proxies, ",")...)
		if err != nil {
			return err
		}
		source = httplimit.XForwardedFor(trusted)
	}
	decoy, err := bcrypt.GenerateFromPassword([]byte(rand.Text()), bcrypt.DefaultCost)
	if err != nil {
		return err
	}
	a := &app{
		pool: pool, limiter: limiter, client: httplimit.ClientIP(source, httplimit.Bits{}),
		hashing: make(chan struct{}, runtime.GOMAXPROCS(0)), decoy: decoy,
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", listen)
	if err != nil {
		return err
	}
	log.Printf("listening on http://%v", listener.Addr())
	server := &http.Server{Handler: a.handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second}
	finished := make(chan error, 1)
	context.AfterFunc(ctx, func() { finished <- server.Shutdown(context.WithoutCancel(ctx)) })
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-finished
}

// signIn returns the token of a new session. It returns a *ratelimit.LimitedError if a limit refused, and errRefused if
// the password is wrong.
func (a *app) signIn(ctx context.Context, account, password, client string) (token string, err error) {
	// 1. Limit. A crash after this line keeps the attempt charged.
	d, err := a.limiter.Take(ctx, perAccount.For(account), perClient.For(client), overall.Global(), locked.For(account))
	if err == nil {
		err = d.Err()
	}
	if err != nil {
		return "", err
	}
	// 2. Verify, outside a transaction: hashing is slow, and a transaction would keep its locks meanwhile.
	user, err := a.verify(ctx, account, password)
	if errors.Is(err, errRefused) {
		if _, err := locked.BlockIfUsedUp(context.WithoutCancel(ctx), a.limiter, account, d.States[0]); err != nil {
			return "", err
		}
	}
	if err != nil {
		return "", err
	}
	// 3. Admit. The account gets back the guesses up to this one. A Reset would also forgive those that came while the
	// password was verified. Its next lock is shorter only after a quiet day. The other two get back one token: if they
	// were reset, the owner of one account could clear the limit of an address by signing in.
	token = rand.Text()
	sum := sha256.Sum256([]byte(token))
	return token, a.limiter.InTx(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO login_sessions VALUES ($1, $2, now() + $3::interval)`, sum[:], user,
			sessionLifetime)
		if err != nil {
			return err
		}
		used := d.States[0].Limit.Capacity() - d.States[0].Remaining
		return a.limiter.WithTx(tx).Credit(ctx, perAccount.For(account).Cost(used), perClient.For(client), overall.Global())
	})
}

// verify returns the ID of the account's user. An unknown account takes as long as a wrong password.
func (a *app) verify(ctx context.Context, account, password string) (user int64, err error) {
	hash := a.decoy
	err = a.pool.QueryRow(ctx, `SELECT id, password_hash FROM login_users WHERE login = $1`, account).Scan(&user, &hash)
	unknown := errors.Is(err, pgx.ErrNoRows)
	if err != nil && !unknown {
		return 0, err
	}
	select {
	case a.hashing <- struct{}{}:
		defer func() { <-a.hashing }()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	err = bcrypt.CompareHashAndPassword(hash, []byte(password))
	if unknown || errors.Is(err, bcrypt.ErrMismatchedHashAndPassword) {
		return 0, errRefused
	}
	return user, err
}

// normalize returns the form of a login that names the user and the bucket, so that "Ada" and "ada " share a limit.
func normalize(login string) (string, error) {
	account := norm.NFC.String(strings.ToLower(strings.TrimSpace(login)))
	if account == "" || len(account) > maxLogin || !utf8.ValidString(login) ||
		strings.ContainsFunc(account, unicode.IsControl) {
		return "", errors.New("this is not a login")
	}
	return account, nil
}

func addUser(ctx context.Context, pool *pgxpool.Pool, login, password string) error {
	account, err := normalize(login)
	if err != nil {
		return err
	}
	hash, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.DefaultCost)
	if err != nil {
		return err
	}
	tag, err := pool.Exec(ctx, `INSERT INTO login_users (login, password_hash) VALUES ($1, $2) ON CONFLICT DO NOTHING`,
		account, hash)
	if err == nil && tag.RowsAffected() == 0 {
		return fmt.Errorf("the account %q exists already", account)
	}
	return err
}

func (a *app) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /login", a.login)
	protected := http.NewCrossOriginProtection().Handler(mux) // pages of other sites cannot sign a visitor in
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		ctx, cancel := context.WithTimeout(r.Context(), 20*time.Second) // for the database and the hash
		defer cancel()
		r.Body = http.MaxBytesReader(w, r.Body, 8<<10)
		protected.ServeHTTP(w, r.WithContext(ctx))
	})
}

func (a *app) login(w http.ResponseWriter, r *http.Request) {
	password := r.PostFormValue("password")
	account, err := normalize(r.PostFormValue("login"))
	if err != nil || password == "" || len(password) > maxPassword {
		http.Error(w, "please check what you typed", http.StatusBadRequest)
		return
	}
	client, err := a.client(r)
	if err != nil {
		fail(w, err)
		return
	}
	token, err := a.signIn(r.Context(), account, password, client)
	switch {
	case httplimit.Respond(w, r, err): // 429 if a limit refused, 503 if the limits cannot be read: both with Retry-After
	case errors.Is(err, errRefused):
		http.Error(w, err.Error(), http.StatusUnauthorized)
	case err != nil:
		fail(w, err)
	default:
		http.SetCookie(w, &http.Cookie{
			Name: "session", Value: token, Path: "/", MaxAge: int(sessionLifetime.Seconds()), HttpOnly: true,
			SameSite: http.SameSiteLaxMode,
			Secure:   r.TLS != nil, // behind a proxy that ends TLS, always set it
		})
		w.WriteHeader(http.StatusNoContent)
	}
}

// fail answers with an error, so the login fails. The cause is for the log only.
func fail(w http.ResponseWriter, err error) {
	log.Print(err)
	w.Header().Set("Retry-After", "5")
	http.Error(w, "this is not possible right now", http.StatusServiceUnavailable)
}
