// Package rules keeps limits' policies in tables, for everybody, a plan or a single key, so you can change them while
// programs run. It records who changed what, when, and why.
//
//	set, err := rules.NewSet(pool, rules.Config{}) // the rules that this process has loaded
//	if err := set.Load(ctx); err != nil {
//		return err
//	}
//	go set.Run(ctx) // follows changes
//	limiter, err := ratelimit.New(pool, ratelimit.Config{Policies: set})
//
// A [Set] answers from memory, so decisions never read the tables. The first of these that exists decides: the key's
// override, the rule for the request's plan, the rule without a plan, the definition in your code.
//
// A [Store] makes changes, each in one transaction or as part of yours, so a rollback undoes them. A change takes
// effect at the same time in every process, by default 2 seconds after the call on the database's clock. A process that
// is notified later uses the old policy until then, and reports it as [event.RulesLoaded].
//
// [ReadFile] reads rules, overrides and tiers from YAML or JSON, and [Store.Apply] stores everything or nothing. A tier
// applies a limit to some requests, with a key made of their attributes. A [Site] turns a request's attributes into the
// requests that one Take decides.
//
// If a load fails, the loaded rules stay in effect, and before the first load your code's definitions decide. A row
// that can't be read leaves the rule before it in effect. docs/rules.md has the details.
package rules
