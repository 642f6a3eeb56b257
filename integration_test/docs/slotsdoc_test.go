package docs_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/scheduler"
	"github.com/pgratelimit/pgratelimit/waitlist"
)

// The functions below hold code blocks of docs/slots.md. The tests run each of them.

var PerMinute = ratelimit.Define("perMinute", ratelimit.PerMinute(60))

// ExportArgs are the arguments of an export.
type ExportArgs struct {
	Tenant string `json:"tenant"`
}

// Kind returns "export".
func (ExportArgs) Kind() string { return "export" }

func slotsJobs(limiter *ratelimit.Limiter, sched *scheduler.Scheduler, config *river.Config) error {
	holder, err := scheduler.NewHolder(limiter, scheduler.HolderConfig{
		Requests: func(job *rivertype.JobRow) ([]ratelimit.Request, error) {
			var args ExportArgs
			err := json.Unmarshal(job.EncodedArgs, &args)
			return []ratelimit.Request{Exports.For(args.Tenant)}, err
		},
	})
	if err != nil {
		return err
	}
	return sched.Install(config, holder) // the river.Config of the client that works the jobs
}

func slotsWait(ctx context.Context, limiter *ratelimit.Limiter, pool *pgxpool.Pool, tenant string) error {
	export := func(context.Context, int64) error { return nil }
	exports, err := waitlist.New(limiter, Exports, waitlist.Config{Pool: pool})
	if err != nil {
		return err
	}
	go func() { _ = exports.Run(ctx) }() // listens for slots that other processes release, until ctx ends

	err = exports.Hold(ctx, func(ctx context.Context, lease ratelimit.Lease) error {
		return export(ctx, lease.Fence)
	}, Exports.For(tenant))
	return err
}

func TestSlotsAreWaitedFor(t *testing.T) {
	t.Parallel()
	testsize.Long(t, documents)
	pool, limiter, _ := guideStand(t)
	require.NoError(t, slotsWait(t.Context(), limiter, pool, "acme"))
}

func slotsHandler(limiter *ratelimit.Limiter, apiKey httplimit.Key, handler http.Handler) (http.Handler, error) {
	limited, err := httplimit.New(limiter, httplimit.Config{Limits: []httplimit.Limit{
		{Limit: Exports, Key: apiKey},
		{Limit: PerMinute, Key: apiKey},
	}})
	if err != nil {
		return nil, err
	}
	return limited(handler), nil
}

func TestSlotsOfJobs(t *testing.T) {
	t.Parallel()
	testsize.Long(t, documents)
	pool, limiter, _ := guideStand(t)
	fences := make(chan int64, 1)
	sched, err := scheduler.New(limiter, scheduler.Config{})
	require.NoError(t, err)
	client := runJobs(t, pool, func(ctx context.Context, _ *river.Job[ExportArgs]) error {
		lease, _ := ratelimit.LeaseFromContext(ctx)
		fences <- lease.Fence
		return nil
	}, func(config *river.Config) error { return slotsJobs(limiter, sched, config) })
	_, err = client.Insert(t.Context(), ExportArgs{Tenant: "acme"}, nil)
	require.NoError(t, err)
	require.Positive(t, <-fences, "it runs with a slot")
}

func TestSlotsOfHandlers(t *testing.T) {
	t.Parallel()
	testsize.Long(t, documents)
	_, limiter, _ := guideStand(t)
	apiKey := func(*http.Request) (string, error) { return "ada", nil }
	depth := 0
	var handler http.Handler
	ask := func() int {
		response := httptest.NewRecorder()
		handler.ServeHTTP(response, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody))
		return response.Code
	}
	var err error
	handler, err = slotsHandler(limiter, apiKey, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		depth++
		w.WriteHeader(ask())
	}))
	require.NoError(t, err)
	require.Equal(t, http.StatusTooManyRequests, ask())
	require.Equal(t, 3, depth)
	require.InDelta(t, 57, tokensOf(t, limiter, PerMinute.For("ada")), 0, "a refusal takes nothing")
	v, err := limiter.Value(t.Context(), Exports.For("ada"))
	require.NoError(t, err)
	require.InDelta(t, 3, v.Tokens, 0, "all slots are free again")
}
