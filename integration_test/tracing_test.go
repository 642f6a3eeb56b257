package integration_test

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// tracing is a tracer that is called with each statement before pgx sends it.
type tracing func(sql string)

func (f tracing) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if f != nil {
		f(data.SQL)
	}
	return ctx
}

func (tracing) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (f tracing) TraceBatchStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, query := range data.Batch.QueuedQueries {
		f.TraceQueryStart(ctx, conn, pgx.TraceQueryStartData{SQL: query.SQL})
	}
	return ctx
}

func (tracing) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (tracing) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}
