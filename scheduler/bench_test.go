package scheduler_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// BenchmarkEnqueue compares a transaction that enqueues with the simplest one by hand, an UPDATE of a balance and an INSERT of a
// job, and with River's InsertTx in place of that INSERT. The transactions alternate, so that what else the machine does meets all
// of them.
//
//	go test ./scheduler -run '^$' -bench Enqueue -benchtime 3000x
func BenchmarkEnqueue(b *testing.B) {
	f := setup(b)
	_, err := f.pool.Exec(b.Context(), `CREATE TABLE balances (key text PRIMARY KEY, value double precision NOT NULL, ts bigint NOT NULL);
		INSERT INTO balances VALUES ('raw', 1e12, 0), ('river', 1e12, 0)`)
	require.NoError(b, err)
	const update = "UPDATE balances SET value = value - $2, ts = greatest(ts, $3) WHERE key = $1"
	const insert = `INSERT INTO river_job (args, kind, max_attempts, metadata, queue, scheduled_at, state)
		VALUES ($1, 'task', 25, '{}', 'default', $2, 'scheduled')`
	at := time.Now().Add(time.Hour)
	ways := []func(ctx context.Context, tx pgx.Tx) error{
		func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, update, "raw", 1.0, at.UnixMicro()); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, insert, `{"name": "task"}`, at)
			return err
		},
		func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, update, "river", 1.0, at.UnixMicro()); err != nil {
				return err
			}
			_, err := f.client.InsertTx(ctx, tx, taskArgs{Name: "task"}, nil)
			return err
		},
		func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.scheduler.Enqueue(ctx, f.client, tx, taskArgs{Name: "task"}, nil, daily.Global().Cost(1e-6))
			return err
		},
	}
	took := make([][]time.Duration, len(ways))
	run := func(way int) time.Duration {
		begun := time.Now()
		require.NoError(b, pgx.BeginFunc(b.Context(), f.pool, func(tx pgx.Tx) error { return ways[way](b.Context(), tx) }))
		return time.Since(begun)
	}
	for way := range ways {
		run(way) // prepares the statements
	}
	for b.Loop() {
		for way := range ways {
			took[way] = append(took[way], run(way))
		}
	}
	var p50 [3]float64
	for way := range ways {
		slices.Sort(took[way])
		p50[way] = float64(took[way][len(took[way])/2].Microseconds())
	}
	b.ReportMetric(p50[0], "raw-µs")
	b.ReportMetric(p50[1], "river-µs")
	b.ReportMetric(p50[2], "enqueue-µs")
	b.ReportMetric(p50[2]/p50[0], "enqueue/raw")
	b.ReportMetric(p50[2]/p50[1], "enqueue/river")
}
