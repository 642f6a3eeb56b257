package scheduler

import (
	"encoding/json"
	"fmt"

	"github.com/riverqueue/river/rivertype"
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

// sameAttempt reports whether the job is at the attempt that was started last. So it is after a snooze, and after its
// client was stopped: River counts neither as an attempt, and gives the number again.
func (s *Scheduler) sameAttempt(job *rivertype.JobRow) bool {
	var metadata map[string]json.RawMessage
	var attempt int
	return json.Unmarshal(job.Metadata, &metadata) == nil && json.Unmarshal(metadata[s.attemptKey()], &attempt) == nil && attempt == job.Attempt
}

// withReservation returns the metadata with the ID of the reservation in it.
func withReservation(metadata map[string]json.RawMessage, key, id string) ([]byte, error) {
	quoted, err := json.Marshal(id)
	if err != nil {
		return nil, err
	}
	metadata[key] = quoted
	return json.Marshal(metadata)
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
	if _, ok := metadata[key]; ok {
		return nil, fmt.Errorf("%w: InsertOpts.Metadata has the key %q, which Enqueue sets", ErrInvalidJob, key)
	}
	return metadata, nil
}

// reservationOf returns the ID of the job's reservation, and whether it has one.
func (s *Scheduler) reservationOf(job *rivertype.JobRow) (string, bool) {
	var metadata map[string]json.RawMessage
	if json.Unmarshal(job.Metadata, &metadata) != nil {
		return "", false
	}
	var id string
	if json.Unmarshal(metadata[s.key], &id) != nil {
		return "", false
	}
	return id, id != ""
}
