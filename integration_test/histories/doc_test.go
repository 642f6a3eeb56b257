// Package histories_test plays random histories of calls in memory and on Postgres, whose answers must be equal to the
// last bit.
//
// A history is drawn from a seed and a number. It has one to four limits, the options of the Limiter, rules, and 8 to
// 30 steps. A step is a call of any verb, a transaction with calls, savepoints and rollbacks, a function of InTx, a
// change of a rule, or a deployment of another definition. Transactions run at three isolation levels. The clock is
// set, and steps back. Each answer, error, event and refusal is a line of text. Calls at the same time are not covered.
//
//	go test ./integration_test/histories -run TestPostgresAnswersLikeMemory/seed=1/47 -seed=1 -v
//
// plays history 47 of seed 1 alone and prints it.
//
// In these texts, durations are in microseconds, and instants are microseconds since the start of the history. Fields
// that are zero are left out. "clock+5" advances the clock by 5 microseconds. The indented lines below a call are the
// states of its limits: "one" is the time until one token is available, and "later" the tokens seven seconds later.
//
// A history runs in a bubble of package synctest. Calls that sleep (take.Wait, Hold, KeepAlive) take no time there.
// Work in the background ends before the next call. So the answers are the same on a busy machine.
//
// The IDs of reservations and the number of rows that Prune deletes are random and left out. So are limits with Shards,
// because a call takes from a random row on a server, and from the first in memory. See [text.decision] for numbers
// that are rounded.
package histories_test
