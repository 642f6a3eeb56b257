package grpclimit_test

import (
	"context"
	"log"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/pgratelimit/pgratelimit/middleware/grpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var (
	PerAddress = ratelimit.Define("perAddress", ratelimit.PerSecond(20))
	Everybody  = ratelimit.Define("everybody", ratelimit.PerSecond(1000))
	Bytes      = ratelimit.Define("bytes", ratelimit.TokenBucket{Rate: 1 << 20, Period: time.Minute})
)

// Each call counts against its address and against all calls together; each received byte counts against the bytes of
// its address. Health checks are free.
func Example() {
	var limiter *ratelimit.Limiter // of the application
	limits, err := grpclimit.New(limiter, grpclimit.Config{
		Requests: func(ctx context.Context, _ string) ([]ratelimit.Request, error) {
			address, err := grpclimit.PeerAddress(ctx)
			if err != nil {
				return nil, err
			}
			return []ratelimit.Request{PerAddress.For(address), Everybody.Global()}, nil
		},
		Message: func(ctx context.Context, _ string, message any) ([]ratelimit.Request, error) {
			address, err := grpclimit.PeerAddress(ctx)
			if err != nil {
				return nil, err
			}
			size := proto.Size(message.(proto.Message))
			return []ratelimit.Request{Bytes.For(address).Cost(float64(size))}, nil
		},
		Skip: func(_ context.Context, fullMethod string) bool {
			return strings.HasPrefix(fullMethod, "/grpc.health.v1.Health/")
		},
		Domain: "shop.example",
	})
	if err != nil {
		log.Print(err)
		return
	}
	grpc.NewServer(grpc.ChainUnaryInterceptor(limits.Unary), grpc.ChainStreamInterceptor(limits.Stream))
}

// A handler shows the remaining tokens, and returns the tokens of a call that turned out to need nothing.
func ExampleFromContext() {
	var limiter *ratelimit.Limiter // of the application
	_ = func(ctx context.Context, userID string) (remaining float64, err error) {
		d, ok := grpclimit.FromContext(ctx)
		if !ok { // allowed without a decision
			return 0, nil
		}
		return d.Remaining, limiter.Credit(ctx, PerAddress.For(userID))
	}
}
