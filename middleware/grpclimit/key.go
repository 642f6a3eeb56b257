package grpclimit

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/pgratelimit/middleware/internal/rpclimit"
)

// PeerAddress returns the IP address of the call's peer, as a key. Of an IPv6 address it returns the /64, and of an
// IPv4 address mapped into IPv6 the IPv4 address. Behind a proxy it is the proxy's address: use Metadata with a value
// that the proxy sets and clients cannot. If a call has x-forwarded-for or forwarded, the interceptor logs that once.
// Its error has the code Internal, for example on a Unix socket.
func PeerAddress(ctx context.Context) (string, error) {
	if i, ok := ctx.Value(forwardedKey{}).(*forwarded); ok {
		i.gate.PeerIsKey(ctx, i.method)
	}
	from, ok := peer.FromContext(ctx)
	if !ok || from.Addr == nil {
		return "", status.Error(codes.Internal, "the call has no peer address")
	}
	key, err := rpclimit.AddressKey(from.Addr.String())
	if err != nil {
		return "", status.Error(codes.Internal, err.Error())
	}
	return key, nil
}

// forwarded is a call that a proxy has forwarded, or whose client says so.
type forwarded struct {
	gate   *rpclimit.Gate[string]
	method string
}

type forwardedKey struct{}

// watched returns ctx, and for a forwarded call one by which PeerAddress finds the gate.
func (i *Interceptor) watched(ctx context.Context, method string) context.Context {
	if len(metadata.ValueFromIncomingContext(ctx, "x-forwarded-for")) == 0 &&
		len(metadata.ValueFromIncomingContext(ctx, "forwarded")) == 0 {
		return ctx
	}
	return context.WithValue(ctx, forwardedKey{}, &forwarded{i.gate, method})
}

// missingKeyError is an error with a code, for those who call Metadata outside of Config.Requests.
type missingKeyError struct{ error }

func (e *missingKeyError) Unwrap() error { return e.error }

func (e *missingKeyError) GRPCStatus() *status.Status {
	return status.New(codes.InvalidArgument, e.Error())
}

// Metadata returns the one value of the call's metadata name, as a key: without spaces around it, and in authorization
// "bearer x" is the key "Bearer x", so that a client has one bucket. If the value is absent, empty, or not the only
// one, the error wraps [ratelimit.ErrInvalidKey]. The interceptor answers it with Config.InvalidKey. Elsewhere it has
// the code InvalidArgument.
func Metadata(ctx context.Context, name string) (string, error) {
	key, err := rpclimit.OnlyValue("metadata", name, metadata.ValueFromIncomingContext(ctx, name))
	if err != nil {
		return "", &missingKeyError{err}
	}
	return key, nil
}
