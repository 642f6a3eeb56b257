// Command keys counts the effect of settings of the table of buckets with many keys: bytes of log, pruned pages, vacuums.
//
//	go run ./keys [-rows 1000000] [-fill 50,70,85,90,100,50:100] [-vacuum 0] [-minute 60000] [-warm 30] [-minutes 5] [-callers 64] [-wal 4GB]
//
// It starts its own server. For each fillfactor and each autovacuum_vacuum_scale_factor it makes and fills the table. "50:100" is
// filled at 50 and is 100 from then on; the scale factor "none" is no vacuum. Then come minutes of standalone Takes of uniformly drawn
// keys. A minute is a number of Takes, so that no count depends on the speed of the machine. After each minute the program vacuums if
// autovacuum would. The minutes that count come after minutes of updates in the server, and after a checkpoint: whole pages are logged
// as between two checkpoints that are as far apart.
//
// It needs the extension pg_walinspect of Postgres 15.
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
	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
)

type options struct {
	rows, minute, warm, minutes, callers int
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
	flags.StringVar(&o.wal, "wal", "4GB", "max_wal_size and wal_keep_size: `size` of what the minutes log, at the least")
	fill := flags.String("fill", "50,70,85,90,100,50:100", "the `fillfactors`")
	vacuum := flags.String("vacuum", "0", "the `scale factors` of autovacuum, or none")
	if err := command.Parse(flags, args); err != nil {
		return o, err
	}
	if o.rows < 100 || o.minute < 1 || o.warm < 0 || o.minutes < 1 || o.callers < 1 {
		return o, errors.New("use 100 rows or more, and one Take, minute and caller or more")
	}
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
	fmt.Fprintf(w, "%s, %d keys, %d Takes a minute, %d minutes after %d\n%s\n", postgres.Version, o.rows, o.minute, o.minutes, o.warm, heading)
	for _, s := range o.settings {
		f, err := measureSetting(ctx, postgres, o, s)
		if err != nil {
			return fmt.Errorf("%v: %w", s, err)
		}
		fmt.Fprintln(w, f.line(s))
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
	t := &table{Database: database, o: o, s: s, callers: load.NewGroup(o.callers, 1)}
	t.callers.Meter = server.NewMeter(postgres).Seconds
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

// figures are the counts of the minutes that count.
type figures struct {
	takes, updates, hot                    int64
	records, pages, prunes, leaves         int64 // bytes of records and of whole pages in the log; records of pruning and of the index
	before, beforeIndex, after, afterIndex int64 // bytes
	minutes                                int64
	vacuum                                 vacuum
	seconds                                float64 // of the server's processor
}

const heading = "                   WAL B a Take      with     updates   prunes   index       vacuums     pages      MB of     dead rows    µs of the   MB of table, index\n" +
	"fill, vacuum        (records)     pages        HOT   a Take   writes a Take  a minute  a minute  WAL a minute  a minute  server a Take    before        after"

// line is a line under heading.
func (f *figures) line(s setting) string {
	each := func(n int64) float64 { return float64(n) / float64(f.takes) }
	minutely := func(n int64) float64 { return float64(n) / float64(f.minutes) }
	const mb = 1e6
	return fmt.Sprintf("%-16s %12.1f %9.0f %8.1f %% %8.3f %11.3f %11.1f %10.0f %12.1f %10.0f %11.1f %8.0f, %.0f %6.0f, %.0f", s,
		each(f.records), each(f.records+f.pages), 100*float64(f.hot)/float64(max(f.updates, 1)), each(f.prunes), each(f.leaves),
		minutely(f.vacuum.ran), minutely(f.vacuum.pages), minutely(f.vacuum.bytes)/mb, minutely(f.vacuum.removed), 1e6*f.seconds/float64(f.takes),
		float64(f.before)/mb, float64(f.beforeIndex)/mb, float64(f.after)/mb, float64(f.afterIndex)/mb)
}
