package scheduler

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// metadataKey returns the key of a job's metadata that holds the ID of its reservation in schema. Limiters
// on different schemas do not touch each other's jobs.
func metadataKey(schema string) string {
	const key = "ratelimit:reservation"
	if schema == "ratelimit" {
		return key
	}
	return key + ":" + schema
}

// attemptKey returns the key of a job's metadata that holds the number of the attempt that was last started.
func (s *Scheduler) attemptKey() string { return s.key + ":attempt" }

// requestsKey returns the key of a job's metadata that holds what the job reserved, as Limiter.MarshalRequests writes
// it.
func (s *Scheduler) requestsKey() string { return s.key + ":requests" }

// readyKey returns the key of a job's metadata that holds the time of its turn.
func (s *Scheduler) readyKey() string { return s.key + ":ready_at" }

// describe returns what the metadata of a job say about its reservation, by their keys.
func (s *Scheduler) describe(r ratelimit.Reservation, requests []ratelimit.Request) (map[string]any, error) {
	if r.ID == "" { // every limit is off
		return map[string]any{s.key: ""}, nil
	}
	written, err := s.limiter.MarshalRequests(requests...)
	return map[string]any{s.key: r.ID, s.requestsKey(): json.RawMessage(written), s.readyKey(): r.ReadyAt.UTC()}, err
}

// requestsOf returns what the job reserved, and nil if its metadata do not say it and Config.Requests does not either.
func (s *Scheduler) requestsOf(job *rivertype.JobRow) ([]ratelimit.Request, error) {
	if written := recorded[json.RawMessage](job, s.requestsKey()); written != nil {
		return s.limiter.UnmarshalRequests(written)
	}
	return requestsFor(job, s.config.Requests) // the job is of a version before requestsKey
}

// sameAttempt reports whether the job is at the attempt that was started last. So it is after a snooze, and after its
// client was stopped: River counts neither as an attempt, and gives the number again.
func (s *Scheduler) sameAttempt(job *rivertype.JobRow) bool {
	return recorded[int](job, s.attemptKey()) == job.Attempt
}

// reservationOf returns the ID of the job's reservation, and "" if it has none.
func (s *Scheduler) reservationOf(job *rivertype.JobRow) string { return recorded[string](job, s.key) }

// recorded returns the value of a key of the job's metadata, and the zero value without such a value.
func recorded[T any](job *rivertype.JobRow, key string) (value T) {
	var metadata map[string]json.RawMessage
	if json.Unmarshal(job.Metadata, &metadata) != nil || json.Unmarshal(metadata[key], &value) != nil {
		return *new(T)
	}
	return value
}

// parseMetadata parses the caller's InsertOpts.Metadata.
func parseMetadata(raw []byte, key string) (map[string]json.RawMessage, error) {
	metadata := make(map[string]json.RawMessage)
	if len(raw) == 0 {
		return metadata, nil
	}
	if err := json.Unmarshal(raw, &metadata); err != nil || metadata == nil {
		return nil, fmt.Errorf("%w: InsertOpts.Metadata is not a JSON object", ErrInvalidJob)
	}
	for name := range metadata {
		if name == key || strings.HasPrefix(name, key+":") {
			return nil, fmt.Errorf("%w: InsertOpts.Metadata has the key %q, which Enqueue sets", ErrInvalidJob, name)
		}
	}
	return metadata, nil
}
