package report

import (
	"encoding/json"
	"io"
	"math"

	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// document is a Run as JSON. Times are in seconds; a figure that was not measured is not there.
type document struct {
	Run
	Scenarios []jsonScenario `json:"scenarios"`
}

type jsonScenario struct {
	Name       string             `json:"name"`
	Title      string             `json:"title"`
	Note       string             `json:"note,omitempty"`
	Callers    int                `json:"callers"`
	Compared   scenario.Figure    `json:"compared"`
	Contenders []jsonContender    `json:"contenders"`
	Facts      map[string]float64 `json:"facts,omitempty"`
	Bars       []jsonBar          `json:"bars"`
}

type jsonContender struct {
	Name    string                          `json:"name"`
	Missing string                          `json:"missing,omitempty"`
	Figures map[scenario.Figure]*jsonSpread `json:"figures,omitempty"`
	Ratio   *jsonSpread                     `json:"ratio,omitempty"` // of the first contender to this one
}

type jsonSpread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

type jsonBar struct {
	Bar      string      `json:"bar"`
	Measured bool        `json:"measured"`
	Reached  bool        `json:"reached"`
	Value    *jsonSpread `json:"value,omitempty"`
}

// JSON writes the run as one JSON document.
func JSON(w io.Writer, run Run) error {
	d := document{Run: run}
	for i := range run.Results {
		d.Scenarios = append(d.Scenarios, scenarioOf(&run.Results[i]))
	}
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(d)
}

func scenarioOf(r *scenario.Result) jsonScenario {
	s := jsonScenario{Name: r.Name, Title: r.Title, Note: r.Note, Callers: r.Callers, Compared: r.Compare, Facts: map[string]float64{}}
	for i, row := range r.Rows {
		c := jsonContender{Name: row.Name, Missing: row.Missing, Figures: map[scenario.Figure]*jsonSpread{}}
		for _, f := range scenario.Figures() {
			if spread := spreadOf(row.Spread(f)); spread != nil {
				c.Figures[f] = spread
			}
		}
		if i > 0 {
			c.Ratio = spreadOf(row.Ratio)
		}
		s.Contenders = append(s.Contenders, c)
	}
	for _, m := range r.Measured {
		s.Facts[m.Name] = m.Value
	}
	for _, v := range r.Verdicts {
		s.Bars = append(s.Bars, jsonBar{Bar: v.String(), Measured: v.Measured, Reached: v.Reached, Value: spreadOf(v.Value)})
	}
	return s
}

// spreadOf returns nil for what was not measured, which JSON has no number for.
func spreadOf(s stats.Spread) *jsonSpread {
	if math.IsNaN(s.Median) {
		return nil
	}
	return &jsonSpread{Median: s.Median, Min: s.Min, Max: s.Max}
}
