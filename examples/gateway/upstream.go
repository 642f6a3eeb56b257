package main

import (
	"encoding/json"
	"net/http"
	"strconv"
	"sync/atomic"
)

// upstream is what the gateway protects. It counts what reaches it, and knows nothing of limits.
type upstream struct {
	requests, tokens atomic.Int64
}

// ServeHTTP answers with how many tokens the request was worth.
func (u *upstream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	tokens, err := strconv.ParseInt(r.Header.Get(costHeader), 10, 64)
	if err != nil {
		http.Error(w, costHeader+" has to be a whole number", http.StatusBadRequest)
		return
	}
	u.requests.Add(1)
	u.tokens.Add(tokens)
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"path": r.URL.Path, "tokens": tokens}) // the client may be gone
}
