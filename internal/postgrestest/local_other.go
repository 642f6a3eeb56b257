//go:build !unix

package postgrestest

import (
	"context"
	"errors"
)

func startLocal(context.Context, Options, environment) (*Server, error) {
	return nil, errors.New("servers are started on Unix only")
}
