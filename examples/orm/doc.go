// Package orm shows limits of pgratelimit in transactions of sqlx, GORM, bun and ent: in one that the library begins, with
// sqllimit.WithTx, and in one of sqllimit.InTx, which is run again when it conflicts, with the library on top.
//
// Each function sends a message if its author may: the limit and the row commit together or not at all.
package orm

import (
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// SendMessage is how often somebody may send.
var SendMessage = ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})

// FreeTrials is what everybody may send together.
var FreeTrials = ratelimit.Define("freeTrials", ratelimit.FixedWindow{Rate: 100, Period: time.Hour})
