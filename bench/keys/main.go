// Command keys measures what settings of the table of buckets cost with many keys, in counts rather than in times.
//
//	go run ./keys [-rows 1000000] [-draw uniform|skewed] [-fill 50,70,85,90,100,50:100] [-vacuum 0] [-new 0]
//	              [-minute 60000] [-warm 30] [-minutes 5] [-callers 64] [-wal 4GB]
//
// It starts a server of its own. For each fillfactor with each autovacuum_vacuum_scale_factor it makes the table anew and fills
// it; "50:100" is filled with a fillfactor of 50, which is set to 100 then, and the scale factor "none" is no vacuum. Then come
// minutes of standalone Takes, whose keys are drawn uniformly, or skewed: one key in a hundred gets 90 % of the calls. A share of
// them may be for keys that are new.
//
// A minute is a number of Takes, so that nothing depends on how fast the machine is. After each the program does what autovacuum
// does once a minute: where there are more dead rows than autovacuum_vacuum_threshold and the scale factor say, it vacuums. The
// minutes that count come after some that do not, which are made of updates in the server, and after a checkpoint: what they log
// of whole pages is what is logged between two checkpoints that are so far apart.
//
// It needs the extension pg_walinspect, of Postgres 15.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/pgratelimit/pgratelimit/bench/internal/command"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

// options are what the program is asked to do.
type options struct {
	rows, minute, warm, minutes, callers int
	skewed                               bool
	fresh                                float64 // the share of the calls that are for new keys
	wal                                  string
	settings                             []setting
}

// setting is how the table is kept.
type setting struct {
	filled, then int     // the fillfactor that it is filled with, and the one that it has then
	scale        float64 // autovacuum_vacuum_scale_factor; negative: no vacuum
}

func (s setting) String() string {
	text := strconv.Itoa(s.filled)
	if s.then != s.filled {
		text += ":" + strconv.Itoa(s.then)
	}
	if s.scale < 0 {
		return text + " none"
	}
	return text + " " + strconv.FormatFloat(s.scale, 'g', -1, 64)
}

func main() {
	command.Run("keys", parse, func(ctx context.Context, o options) error { return measure(ctx, os.Stdout, o) })
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("keys", flag.ContinueOnError)
	flags.IntVar(&o.rows, "rows", 1_000_000, "how many `keys` there are")
	flags.IntVar(&o.minute, "minute", 60_000, "how many `Takes` are a minute")
	flags.IntVar(&o.warm, "warm", 30, "how many `minutes` do not count")
	flags.IntVar(&o.minutes, "minutes", 5, "how many `minutes` count")
	flags.IntVar(&o.callers, "callers", 64, "how many goroutines call")
	flags.Float64Var(&o.fresh, "new", 0, "the `share` of the calls that are for new keys")
	flags.StringVar(&o.wal, "wal", "4GB", "max_wal_size and wal_keep_size: `size` of what the minutes log, at the least")
	draw := flags.String("draw", "uniform", "how keys are drawn: uniform or skewed")
	fill := flags.String("fill", "50,70,85,90,100,50:100", "the `fillfactors`")
	vacuum := flags.String("vacuum", "0", "the `scale factors` of autovacuum, or none")
	if err := command.Parse(flags, args); err != nil {
		return o, err
	}
	switch {
	case o.rows < 100 || o.minute < 1 || o.warm < 0 || o.minutes < 1 || o.callers < 1:
		return o, errors.New("use 100 rows or more, and one Take, minute and caller or more")
	case *draw != "uniform" && *draw != "skewed":
		return o, fmt.Errorf("the draw %q is neither uniform nor skewed", *draw)
	}
	o.skewed = *draw == "skewed"
	o.settings, err = parseSettings(*fill, *vacuum)
	return o, err
}

// parseSettings returns each fillfactor with each scale factor.
func parseSettings(fill, vacuum string) (all []setting, err error) {
	for _, text := range strings.Split(fill, ",") {
		filled, then, changes := strings.Cut(text, ":")
		if !changes {
			then = filled
		}
		var s setting
		if s.filled, err = strconv.Atoi(filled); err != nil {
			return nil, err
		}
		if s.then, err = strconv.Atoi(then); err != nil {
			return nil, err
		}
		for _, scale := range strings.Split(vacuum, ",") {
			if s.scale = -1; scale != "none" {
				if s.scale, err = strconv.ParseFloat(scale, 64); err != nil {
					return nil, err
				}
			}
			all = append(all, s)
		}
	}
	return all, nil
}

// measure starts a server, and writes a line for each setting.
func measure(ctx context.Context, w io.Writer, o options) (err error) {
	postgres, err := server.StartPostgres(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, postgres.Close()) }()
	draw := "uniform"
	if o.skewed {
		draw = "skewed"
	}
	_, err = fmt.Fprintf(w, "%s, %d keys, %s draw, %g %% of the calls for new ones, %d Takes a minute, %d minutes after %d\n%s\n", postgres.Version, o.rows, draw, 100*o.fresh,
		o.minute, o.minutes, o.warm, heading)
	if err != nil {
		return err
	}
	for _, s := range o.settings {
		f, err := measureSetting(ctx, postgres, o, s)
		if err != nil {
			return fmt.Errorf("%v: %w", s, err)
		}
		if _, err := fmt.Fprintln(w, f.line(s)); err != nil {
			return err
		}
	}
	return nil
}

// measureSetting measures one setting in a database of its own.
func measureSetting(ctx context.Context, postgres *server.Postgres, o options, s setting) (f figures, err error) {
	database, err := postgres.NewDatabase(ctx)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, database.Drop(ctx)) }()
	meter, err := server.NewMeter(ctx, postgres, nil)
	if err != nil {
		return f, err
	}
	t := &table{Database: database, o: o, s: s, meter: meter, next: o.rows}
	if err := t.fill(ctx); err != nil {
		return f, err
	}
	for range o.warm {
		if err := t.warmUp(ctx); err != nil {
			return f, err
		}
	}
	if err := t.sizes(ctx, &f.before, &f.beforeIndex); err != nil {
		return f, err
	}
	if err := database.Checkpoint(ctx); err != nil {
		return f, err
	}
	for range o.minutes {
		if err := t.minute(ctx, &f); err != nil {
			return f, err
		}
	}
	return f, t.sizes(ctx, &f.after, &f.afterIndex)
}
