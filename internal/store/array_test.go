package store

import (
	"math"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// modes are those in which pgx sends parameters and reads answers.
var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

func TestArraysArriveAsTheyAre(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	texts := array[text]{"plain", "", " with spaces ", `with "quotes" and \ and ' and $1`, "{a,b}", "NULL", "grüße, 世界", "line\nbreak"}
	integers, bigints := array[integer]{0, -1, math.MaxInt32, math.MinInt32}, array[bigint]{0, -1, math.MaxInt64, math.MinInt64}
	doubles := array[double]{0, -1.5, math.MaxFloat64, math.SmallestNonzeroFloat64, 1e12 + 0.1}
	for _, mode := range modes {
		var gotTexts []string
		var gotIntegers []int32
		var gotBigints []int64
		var gotDoubles []float64
		var isNull, isEmpty bool
		err := pool.QueryRow(t.Context(), "SELECT $1::text[], $2::integer[], $3::bigint[], $4::float8[], $5::text[] IS NULL, $6::float8[] = '{}'",
			mode, texts, integers, bigints, doubles, array[text](nil), array[double]{}).Scan(&gotTexts, &gotIntegers, &gotBigints, &gotDoubles, &isNull, &isEmpty)
		require.NoError(t, err, mode)
		require.Len(t, gotTexts, len(texts))
		for i := range gotTexts {
			require.Equal(t, string(texts[i]), gotTexts[i], mode)
		}
		for i := range gotIntegers {
			require.Equal(t, int32(integers[i]), gotIntegers[i], mode)
			require.Equal(t, int64(bigints[i]), gotBigints[i], mode)
		}
		require.Len(t, gotDoubles, len(doubles))
		for i := range gotDoubles {
			require.Equal(t, math.Float64bits(float64(doubles[i])), math.Float64bits(gotDoubles[i]), mode)
		}
		require.True(t, isNull && isEmpty, mode)
	}
}

func TestAnswersAreReadAsTheyAre(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	tests := []struct {
		columns string
		want    bucket.Answer
		fails   bool
	}{
		{columns: "true, 0.1::float8, 7::bigint, -9::bigint", want: bucket.Answer{Allowed: true, State: bucket.State{Value: 0.1, TS: 7}, Now: -9}},
		{
			columns: "false, -1e300::float8, -7::bigint, 9::bigint",
			want:    bucket.Answer{State: bucket.State{Value: -1e300, TS: -7}, Now: 9},
		},
		{columns: "NULL::boolean, 0.1::float8, 7::bigint, 9::bigint", fails: true},
		{columns: "true, 0.1::float8, 7::bigint", fails: true},
	}
	for _, mode := range modes {
		for _, test := range tests {
			rows, err := pool.Query(t.Context(), "SELECT "+test.columns, mode)
			require.NoError(t, err)
			answers, err := scanAnswers(rows, nil)
			if test.fails {
				require.Error(t, err, "%v: %s", mode, test.columns)
				continue
			}
			require.NoError(t, err, "%v: %s", mode, test.columns)
			require.Equal(t, []bucket.Answer{test.want}, answers, "%v: %s", mode, test.columns)
		}
	}
}
