// Package report writes the results of a run as text, and as JSON.
package report

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// Run holds the results and the machine.
type Run struct {
	Machine  server.Machine    `json:"machine"`
	Postgres string            `json:"postgres"`
	Settings map[string]string `json:"settings"`
	Redis    string            `json:"redis"` // the version, or the reason for its absence
	Rounds   int               `json:"rounds"`
	Round    time.Duration     `json:"roundNs"`
	Quick    bool              `json:"quick"`
	Results  []scenario.Result `json:"-"`
}

// Document is a Run as JSON. Times are in seconds. Figures that were not measured are absent.
type Document struct {
	Run
	// Scenarios are the figures by the names of the scenario and the contender, without the points of curves.
	Scenarios map[string]map[string]map[scenario.Figure]stats.Spread `json:"scenarios,omitempty"`
	Curves    []scenario.Curve                                       `json:"curves,omitempty"`
}

// Of returns the run as a document.
func Of(run Run) Document {
	d := Document{
		Run: run, Curves: scenario.Curves(run.Results),
		Scenarios: map[string]map[string]map[scenario.Figure]stats.Spread{},
	}
	for _, r := range run.Results {
		if r.Curve != "" {
			continue
		}
		contenders := map[string]map[scenario.Figure]stats.Spread{}
		for _, row := range r.Rows {
			figures := map[scenario.Figure]stats.Spread{}
			for _, f := range scenario.Figures() {
				if spread := row.Spread(f).Known(); spread != nil {
					figures[f] = *spread
				}
			}
			contenders[row.Name] = figures
		}
		d.Scenarios[r.Name] = contenders
	}
	return d
}

// JSON writes the document.
func (d Document) JSON(w io.Writer) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(d)
}

// ReadJSON reads a document that JSON wrote.
func ReadJSON(r io.Reader) (d Document, err error) {
	if err := json.NewDecoder(r).Decode(&d); err != nil {
		return d, fmt.Errorf("read the figures: %w", err)
	}
	return d, nil
}
