// Package report writes what was measured, for readers and for programs.
package report

import (
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

// Run is what a run measured, and on what.
type Run struct {
	Machine  server.Machine    `json:"machine"`
	Postgres string            `json:"postgres"`
	Settings map[string]string `json:"settings"`
	Redis    string            `json:"redis"` // why there is none, when there is none
	Rounds   int               `json:"rounds"`
	Round    time.Duration     `json:"roundNs"`
	Quick    bool              `json:"quick"`
	Against  string            `json:"against,omitempty"` // the commit that was measured too
	Results  []scenario.Result `json:"-"`
}
