// Package rules keeps the policies of limits in tables, where they can be changed while programs run: for all keys of a
// limit, for those on a plan, and for a single key; with who changed what, when and why.
//
// A [Set] is what a program has loaded of them. It is a [ratelimit.Policies], and answers from memory.
package rules
