package httplimit

import "errors"

var (
	// ErrNoLimit is returned by [Admission.Settle] for a limit that the request's middleware does not have.
	ErrNoLimit = errors.New("httplimit: the middleware does not have this limit")

	// ErrInvalidCost is what your Cost returns if a request states an invalid cost, which is answered 400.
	ErrInvalidCost = errors.New("httplimit: invalid cost")
)
