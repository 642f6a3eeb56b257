// Package rules keeps the policies of limits in tables, where they can be changed while programs run: for all keys of a
// limit, for those on a plan, and for a single key; with who changed what, when and why.
//
// A [Store] writes the table. Each change is one transaction, or part of the caller's. It adds rows, which are the
// history, and takes none away; it adds 1 to the version of the rules, and notifies every program that listens.
//
// A [Set] has the rules that a program has loaded. It is a [ratelimit.Policies], and answers from memory:
//
//	set, err := rules.NewSet(pool, rules.Config{})
//	...
//	go set.Run(ctx)
//	limiter, err := ratelimit.New(pool, ratelimit.Config{Policies: set})
//
// # When a change holds
//
// A change takes effect at an instant of the database's clock, by default 2 seconds after it is made. Before the
// instant every program uses the old policy, and from it on the new one; its mode changes by the clock of each program,
// which the Set corrects. A program that is notified later uses the old policy until then; [ratelimit.RulesLoaded]
// reports it. If another change lies ahead, a new change with a later instant follows it, and a new change with an
// earlier instant replaces it.
//
// The most specific policy decides a request: an override of its key, then the rule of its plan, then
// the rule without a plan, then the definition in the code. If one ends, the next takes over at that instant.
//
// # Tiers, files, refusals
//
// A [Tier] applies a limit to some requests, with a key made of their attributes, at a cost. A [Site] makes the
// requests of the tiers in the table, or of the code's tiers if the table has none. Pass them to one Take, which takes
// from all limits or from none.
//
// [ReadFile] reads rules, tiers and overrides from YAML or JSON. [Store.Apply] stores them, all or nothing. A rule that
// is no longer in a file stays until it is deleted.
//
// Package refusals counts the refusals of each limit and key. Pass its method to Config.Refused of package ratelimit;
// it needs no rules. It writes sums, and the heaviest keys apart, so that the number of rows is bounded.
//
// # When something fails
//
// Without a database, and before the first load, the definitions in the code decide. If a load fails, the rules of the
// last load stay in effect. If a row cannot be read, the row before it stays in effect, and the other rows are loaded.
package rules
