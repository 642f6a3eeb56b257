package connectlimit_test

import (
	"context"
	"log"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/pgratelimit/pgratelimit/middleware/connectlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var (
	PerKey    = ratelimit.Define("perKey", ratelimit.PerSecond(20))
	Everybody = ratelimit.Define("everybody", ratelimit.PerSecond(1000))
	Bytes     = ratelimit.Define("bytes", ratelimit.TokenBucket{Rate: 1 << 20, Period: time.Minute})
)

// Each call counts against its API key and against all calls together; each received byte counts against the bytes of
// its key.
func Example() {
	var limiter *ratelimit.Limiter // of the application
	limits, err := connectlimit.New(limiter, connectlimit.Config{
		Requests: func(_ context.Context, call connectlimit.Call) ([]ratelimit.Request, error) {
			key, err := call.HeaderValue("X-Api-Key")
			if err != nil {
				return nil, err
			}
			return []ratelimit.Request{PerKey.For(key), Everybody.Global()}, nil
		},
		Message: func(_ context.Context, call connectlimit.Call, message any) ([]ratelimit.Request, error) {
			key, err := call.HeaderValue("X-Api-Key")
			if err != nil {
				return nil, err
			}
			size := proto.Size(message.(proto.Message))
			return []ratelimit.Request{Bytes.For(key).Cost(float64(size))}, nil
		},
		Domain: "shop.example",
	})
	if err != nil {
		log.Print(err)
		return
	}
	ping := func(context.Context, *connect.Request[emptypb.Empty]) (*connect.Response[emptypb.Empty], error) {
		return connect.NewResponse(&emptypb.Empty{}), nil
	}
	http.Handle("/shop.Shop/Ping", connect.NewUnaryHandler("/shop.Shop/Ping", ping, connect.WithInterceptors(limits)))
}
