// Package recorded_test holds the answers of random histories as they are today, so that a change of the core shows.
//
// A history is drawn from its number: one to four limits of all kinds, the options of the Limiter, rules with their eras, and 8 to 30
// steps. A step is a call of any verb, a transaction at one of three isolation levels with calls, savepoints and rollbacks, a
// function of InTx, a change of a rule, a deployment of another definition, or calls of a Simulation. The clock is set, and steps
// back. Each answer, error, event and refusal is a line of text, and the hash of all lines is compared with the one in testdata.
// CHANGES.md says how to note a deliberate change.
//
//	go test ./recorded -run 'TestRecorded$' -history 4711 -v
//
// prints history 4711 as the code of the checkout answers it; TestRecordedOnPostgres does so as a server answers it.
//
// A history runs in a bubble of package synctest. What sleeps (Wait, Hold, Keep) takes no time there, what goes on in the background has
// ended before the next call, and no busy machine changes an answer.
//
// Numbers are written with as many digits as tell them from every other float64. The vectors hold on other processors too,
// as far as the algebra does: it converts each product to float64 before it adds, so that no compiler fuses the two. Two kinds
// of numbers are left out or rounded, because server and memory rightly differ in them: see text.decision.
//
// What is picked at random is left out as well: the IDs of reservations, how many rows Prune deletes, token buckets with Shards, and
// changes of the policy of a sharded window other than the number of its rows. A call asks for one adaptive limit at most. A server
// is not asked for histories in which a sharded limit has a rule for one plan or key.
//
// The short tier runs 2,000 histories in memory and 120 on Postgres; the full size runs 100,000 and 2,000. With the race detector
// every 20th of the 100,000 and every fifth of the 2,000 runs; make nightly runs all without it.
// Config.SharedQueues is not here, as it needs several processes, nor are calls at the same time.
package recorded_test
