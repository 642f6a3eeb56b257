package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// bucketID names a row of ratelimit.buckets.
type bucketID struct{ name, key string }

// bucketRow is what a row holds: value tokens at the instant ts.
type bucketRow struct {
	value float64
	ts    time.Time
}

// rows returns the whole table.
func (st *stage) rows(ctx context.Context) (map[bucketID]bucketRow, error) {
	found, err := st.pool.Query(ctx, `SELECT name, key, value, ts FROM ratelimit.buckets`)
	if err != nil {
		return nil, fmt.Errorf("read the buckets: %w", err)
	}
	rows := map[bucketID]bucketRow{}
	var id bucketID
	var value float64
	var ts int64
	_, err = pgx.ForEachRow(found, []any{&id.name, &id.key, &value, &ts}, func() error {
		rows[id] = bucketRow{value, time.UnixMicro(ts)}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the buckets: %w", err)
	}
	return rows, nil
}

// maxRowsShown is how many rows of one limit are shown for an act.
const maxRowsShown = 3

// describeChanges writes a line for each row that is not as it was before.
func (st *stage) describeChanges(w io.Writer, act int, before, after map[bucketID]bucketRow) {
	changed := map[string][]string{} // lines by the limit's name
	for id, row := range after {
		was, found := before[id]
		if found && was == row {
			continue
		}
		from := "no row: full"
		if found {
			from = st.describe(was)
		}
		changed[id.name] = append(changed[id.name], fmt.Sprintf("%-13s  %-6.6s  %-16s  ->  %s", id.name, id.key, from, st.describe(row)))
	}
	if len(changed) == 0 {
		fmt.Fprintf(w, "%d  none\n", act)
	}
	for _, name := range slices.Sorted(maps.Keys(changed)) {
		lines := changed[name]
		slices.Sort(lines)
		for _, line := range lines[:min(len(lines), maxRowsShown)] {
			fmt.Fprintf(w, "%d  %s\n", act, line)
		}
		if more := len(lines) - maxRowsShown; more > 0 {
			fmt.Fprintf(w, "%d  %-13s  and %d more\n", act, name, more)
		}
	}
}

// describe returns a row as (value, ts), with ts counted from the start of the play.
func (st *stage) describe(row bucketRow) string {
	return fmt.Sprintf("(%.4g, %s)", row.value, short(row.ts.Sub(st.start)))
}

// short returns d without the zeros at its end: 3m, not 3m0s.
func short(d time.Duration) string {
	if d == 0 {
		return "0"
	}
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}
