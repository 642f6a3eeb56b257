package httplimit

import "errors"

var (
	// ErrNoRule is returned by [Admission.Settle] for a limit that no rule of the request's middleware has.
	ErrNoRule = errors.New("httplimit: no rule has this limit")

	// ErrInvalidCost is what a Cost returns for a request that states one which cannot be taken. The request
	// is answered 400.
	ErrInvalidCost = errors.New("httplimit: invalid cost")
)
