package report

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/pgratelimit/pgratelimit/bench/internal/scenario"
	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

// Document is a Run as JSON has it. Times are in seconds; a figure that was not measured is not there. What is a point of a
// curve is in Curves alone.
type Document struct {
	Run
	Scenarios []Scenario       `json:"scenarios,omitempty"`
	Curves    []scenario.Curve `json:"curves,omitempty"`
}

// Scenario is one of the scenarios of a Document.
type Scenario struct {
	Name       string             `json:"name"`
	Title      string             `json:"title"`
	Note       string             `json:"note,omitempty"`
	Callers    int                `json:"callers"`
	Compared   scenario.Figure    `json:"compared"`
	Contenders []Contender        `json:"contenders"`
	Facts      map[string]float64 `json:"facts,omitempty"`
	Bars       []Bar              `json:"bars,omitempty"`
}

// Contender is what was measured of a contender.
type Contender struct {
	Name    string                            `json:"name"`
	Missing string                            `json:"missing,omitempty"`
	Figures map[scenario.Figure]*stats.Spread `json:"figures,omitempty"`
	Ratio   *stats.Spread                     `json:"ratio,omitempty"` // of the first contender to this one
	Cost    *stats.Spread                     `json:"cost,omitempty"`  // the same of the processor's time
}

// Bar is a bound and what was measured of it.
type Bar struct {
	Bar      string        `json:"bar"`
	Measured bool          `json:"measured"`
	Reached  bool          `json:"reached"`
	Value    *stats.Spread `json:"value,omitempty"`
}

// Of returns the run as a document.
func Of(run Run) Document {
	d := Document{Run: run, Curves: scenario.Curves(run.Results)}
	for i := range run.Results {
		if run.Results[i].Curve != "" {
			continue
		}
		d.Scenarios = append(d.Scenarios, scenarioOf(&run.Results[i]))
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
func ReadJSON(r io.Reader) (Document, error) {
	var d Document
	if err := json.NewDecoder(r).Decode(&d); err != nil {
		return d, fmt.Errorf("read the figures: %w", err)
	}
	return d, nil
}

func scenarioOf(r *scenario.Result) Scenario {
	s := Scenario{Name: r.Name, Title: r.Title, Note: r.Note, Callers: r.Callers, Compared: r.Compare}
	for i, row := range r.Rows {
		c := Contender{Name: row.Name, Missing: row.Missing}
		for _, f := range scenario.Figures() {
			if spread := row.Spread(f).Known(); spread != nil {
				if c.Figures == nil {
					c.Figures = map[scenario.Figure]*stats.Spread{}
				}
				c.Figures[f] = spread
			}
		}
		if i > 0 {
			c.Ratio, c.Cost = row.Ratio.Known(), row.Cost.Known()
		}
		s.Contenders = append(s.Contenders, c)
	}
	for _, m := range r.Measured {
		if s.Facts == nil {
			s.Facts = map[string]float64{}
		}
		s.Facts[m.Name] = m.Value
	}
	for _, v := range r.Verdicts {
		s.Bars = append(s.Bars, Bar{Bar: v.String(), Measured: v.Measured, Reached: v.Reached, Value: v.Value.Known()})
	}
	return s
}
