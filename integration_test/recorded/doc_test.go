// Package recorded_test compares the answers of random histories with recorded ones, so that a change of behaviour is
// noticed.
//
// A history is drawn from its number, which also says what it is about: see subject. It has one to four limits, the
// options of the Limiter, rules, and 8 to 30 steps. A step is a call of any verb, a transaction with calls, savepoints
// and rollbacks, a function of InTx, a change of a rule, a deployment of another definition, or calls of a Simulation.
// Transactions run at three isolation levels. The clock is set, and steps back. Each answer, error, event and refusal
// is a line of text, and the hash of all lines is compared with the one in testdata. CHANGES.md says how to note a
// deliberate change.
//
//	go test ./integration_test/recorded -run 'TestRecorded$' -history 4711 -v
//
// prints history 4711 with the answers of the checkout. With TestRecordedOnPostgres it prints the answers of a server.
//
// In these texts, durations are in microseconds, and instants are microseconds since the start of the history. Fields
// that are zero are left out. "clock+5" advances the clock by 5 microseconds. The indented lines below a call are the
// states of its limits: "one" is the time until one token is available, and "later" the tokens seven seconds later.
//
// A history runs in a bubble of package synctest. Calls that sleep (take.Wait, Hold, Keep) take no time there. Work in
// the background ends before the next call. So the answers are the same on a busy machine.
//
// Numbers are written with all their digits. They are the same on every processor, because the algebra converts each
// product to float64 before it adds, so that no compiler fuses the two. Two kinds of numbers are left out or rounded,
// because a server and memory may differ in them: see text.decision.
//
// Random results are left out as well: the IDs of reservations, and how many rows Prune deletes. The answers of
// a server are not compared where it may answer otherwise: see differsOnServer.
//
// The short tier runs 2,000 histories in memory and 120 on Postgres; the full size runs 80,000 and 1,600. With the race
// detector every 19th of the 80,000 and every fifth of the 1,600 runs; make nightly runs all without it. Not covered
// are calls at the same time.
package recorded_test
