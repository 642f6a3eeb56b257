package cli

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/serve"
)

// serving has the flags of serve.
type serving struct {
	http, grpc                   string
	domains, charged, attributes []string
	hosts                        []string
	tokenFile, certFile, keyFile string
	drain                        time.Duration
}

func (a *app) serveCommand() *cobra.Command {
	var f serving
	cmd := a.command(cobra.Command{
		Use:   "serve",
		Short: "Decide for gateways and for programs in other languages, over gRPC and HTTP",
		Long: `Answer rate limit calls by the stored rules, until interrupted. A changed rule takes effect without a restart.

--grpc is the rate limit service of Envoy. Tiers can use the entries user, tenant, plan, address and route of a descriptor.
Declare other entries with --attribute. Calls for a domain of --charged-domain always take their hits,
even below zero: use such a domain for apply_on_stream_done. Set failure_mode_deny in Envoy.

--http has POST /v1/take, /v1/check, /v1/reserve and /v1/settle with JSON, the admin page under /limits/, /metrics for
Prometheus, and /healthz. A refusal has status 429, application/problem+json and Retry-After:

  curl -d '{"requests":[{"limit":"messages","key":"ada","cost":2,"plan":"pro"}]}' http://127.0.0.1:8080/v1/take

A limit needs a stored rule. A request needs a key, or "global":true. settle needs the id of reserve, and requests with the
actual costs; without requests the reserved costs stay. A repeated settle changes nothing. A cost above the
capacity has status 413, and a plan that no stored rule has 400, if others have one.

Every call except health needs a token of --token-file, as Authorization: Bearer. A browser sends it as the password of any
user; the page is read-only. Without tokens serve listens only on addresses of this machine, and its HTTP server answers only
under names of this machine and of --host. It refuses requests that a page of another site makes.

Tokens and certificate are read again when their files change, and on SIGHUP. /healthz and the health service of gRPC say
whether the database answers. After an interrupt they say no, and serve still answers for --drain.`,
		Args:    cobra.NoArgs,
		Example: "  ratelimit serve --domain edge --attribute masked_remote_address --token-file tokens.txt",
	}, func(ctx context.Context, _ []string) error { return a.serve(ctx, &f) })
	flags := cmd.Flags()
	flags.StringVar(&f.http, "http", "127.0.0.1:8080", "address of the HTTP server")
	flags.StringVar(&f.grpc, "grpc", "127.0.0.1:8081", "address of the gRPC server")
	flags.StringSliceVar(&f.domains, "domain", []string{"ratelimit"}, "domain of Envoy's configuration; several are "+
		"possible")
	flags.StringSliceVar(&f.charged, "charged-domain", nil, "domain whose hits are always taken; several are possible")
	flags.StringSliceVar(&f.attributes, "attribute", nil, "name of an entry of descriptors that tiers use; several are "+
		"possible")
	flags.DurationVar(&f.drain, "drain", 0, "time to answer still after an interrupt, while the health is not ready")
	flags.StringVar(&f.tokenFile, "token-file", "", "file with a token of 16 characters or more on each line")
	flags.StringSliceVar(&f.hosts, "host", nil, "further name under which clients reach the HTTP server without tokens; "+
		"several are possible")
	flags.StringVar(&f.certFile, "tls-cert", "", "file with the certificate of both servers")
	flags.StringVar(&f.keyFile, "tls-key", "", "file with the key of the certificate")
	a.withHashKey(cmd)
	return cmd
}

// serve listens, and serves until ctx ends.
func (a *app) serve(ctx context.Context, f *serving) error {
	secrets, err := a.credentials(f)
	if err != nil {
		return err
	}
	for flag, address := range map[string]string{"--http": f.http, "--grpc": f.grpc} {
		if err := serve.CheckAddress(address, len(secrets.Tokens)); err != nil {
			return misused("%s is %.80q: %w", flag, address, err)
		}
	}
	secret, err := a.hashKey()
	if err != nil {
		return err
	}
	config, from, err := a.databaseConfig()
	if err != nil {
		return err
	}
	pool, closePool, err := a.newPool(ctx, config, from)
	if err != nil {
		return err
	}
	defer closePool()
	logger := slog.New(slog.NewJSONHandler(a.errOut, nil))
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	var server *serve.Server
	err = within(ctx, a.options.timeout, func(ctx context.Context) error {
		if err := ping(ctx, pool, from); err != nil {
			return err
		}
		server, err = serve.New(ctx, serve.Config{
			Pool: pool, Schema: a.options.schema, HashKey: secret, Domains: f.domains, Charged: f.charged,
			Attributes:  f.attributes,
			Credentials: secrets, Reread: func() (serve.Credentials, error) { return a.credentials(f) }, Hangup: hangup,
			Hosts: f.hosts, Drain: f.drain, Logger: logger,
		})
		return err
	})
	if err != nil {
		return a.explain(err)
	}
	web, err := listen(ctx, "--http", f.http)
	if err != nil {
		return err
	}
	gateways, err := listen(ctx, "--grpc", f.grpc)
	if err != nil {
		_ = web.Close()
		return err
	}
	logger.InfoContext(ctx, "serve: listening", slog.String("http", web.Addr().String()),
		slog.String("grpc", gateways.Addr().String()))
	if err := server.Run(ctx, web, gateways); err != nil {
		logger.ErrorContext(ctx, "serve: stopped", slog.String("error", a.scrub(err.Error())))
		return answer(exitFailure)
	}
	logger.InfoContext(ctx, "serve: stopped")
	return nil
}

func listen(ctx context.Context, flag, address string) (net.Listener, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", address)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("%s is %s, which another program uses; choose another port with %s", flag, address, flag)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	return listener, nil
}

// credentials reads the tokens and the certificate.
func (a *app) credentials(f *serving) (secrets serve.Credentials, err error) {
	if f.tokenFile != "" {
		text, err := os.ReadFile(f.tokenFile)
		if err != nil {
			return secrets, misused("--token-file: %w", err)
		}
		lines := strings.Split(strings.TrimSpace(string(text)), "\n")
		if lines[0] == "" {
			return secrets, misused("--token-file: the file is empty; write a token on each line, such as openssl rand -hex " +
				"32 prints")
		}
		for i, line := range lines {
			token := strings.TrimSpace(line)
			if len(token) < 16 || strings.ContainsAny(token, " \t") {
				return secrets, misused("--token-file: line %d is no token of 16 characters or more without a space, such as "+
					"openssl rand -hex 32 prints", i+1)
			}
			secrets.Tokens = append(secrets.Tokens, token)
			if !slices.Contains(a.secrets, token) {
				a.secrets = append(a.secrets, token)
			}
		}
	}
	if (f.certFile == "") != (f.keyFile == "") {
		return secrets, misused("--tls-cert and --tls-key go together; give both, or none")
	}
	if f.certFile == "" {
		return secrets, nil
	}
	pair, err := tls.LoadX509KeyPair(f.certFile, f.keyFile)
	if err != nil {
		return secrets, misused("--tls-cert and --tls-key: %w", err)
	}
	secrets.Certificate = &pair
	return secrets, nil
}
