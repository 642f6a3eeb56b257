// Package rules keeps the policies of limits in tables, where they can be changed while programs run: for all keys of a
// limit, for those on a plan, and for a single key; with who changed what, when and why.
//
// A [Store] writes the table. Each change is one transaction, or part of the caller's. It adds rows, which are the history, and
// takes none away; it adds 1 to the version of the rules, and notifies every program that listens.
//
// A [Set] is what a program has loaded of them. It is a [ratelimit.Policies], and answers from memory:
//
//	set, err := rules.NewSet(pool, rules.Config{})
//	...
//	go set.Run(ctx)
//	limiter, err := ratelimit.New(pool, ratelimit.Config{Policies: set})
//
// # When a change holds
//
// A change holds from an instant of the database's clock, by default 2 seconds after it is made, in every program alike,
// provided each hears of it until then: before the instant the former policy decides, and from it on the new one. A program
// that hears of it later decides by the former policy until it does; [ratelimit.RulesLoaded] says so. A change that is made
// while another still lies ahead follows that one when it holds from a later instant, and takes its place otherwise.
//
// Of the policies that fit a request the most specific one decides: an override of its key, then the rule of its plan, then
// the rule without a plan, then the definition in the code. Where one ends, the next takes over at that instant.
//
// # Tiers, files, refusals
//
// A [Tier] says that requests of some kind are asked of a limit, for a key made of their attributes, at a cost. A [Site]
// asks what the tiers in the tables say, or those of the code where there are none. Its requests are for one Take, which
// takes from all of them or from none.
//
// [ReadFile] reads rules, tiers and overrides from YAML or JSON. What it returns is stored by [Store.Apply], which makes
// all of it hold or nothing. A rule that a file no longer has stays until it is deleted.
//
// Package refusals counts who was refused by which limit. It is told by Config.Refused of package ratelimit, and needs no
// rules. It writes sums, the heaviest keys apart, so that what it writes is bounded whoever is refused.
//
// # When something fails
//
// A program without a database, or before the first load, decides by the definitions in its code. A load that fails leaves
// what was loaded before. A row that cannot be read leaves in effect what was stated before it, and the others are loaded.
package rules
