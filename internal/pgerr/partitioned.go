package pgerr

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// ErrPartitioned is the error for a table of buckets in partitions, on every version of Postgres, so that no upgrade of
// the server makes a working program crash it. PostgreSQL 18 ends by a segmentation fault if a statement looks up
// several rows in partitions, and another transaction has changed one of them meanwhile: the executor checks the
// changed row by a second copy of the plan, which shares the data that choose the partition with the first copy, and
// frees them (EvalPlanQual and InitExecPartitionPruneContexts; seen with 18.4).
var ErrPartitioned = errors.New("the table of buckets is partitioned")

// PartitionedError returns ErrPartitioned with the cure.
func PartitionedError(schema string) error {
	return fmt.Errorf("%w: %s must be one plain table, because the statements on it crash PostgreSQL 18 in partitions; "+
		"copy its rows into a plain table "+
		"(ratelimit doctor prints the statements)", ErrPartitioned, pgx.Identifier{schema, "buckets"}.Sanitize())
}
