package migrations

// What the tests of this package see beside its exported names.
var (
	NewProvider = newProvider
	Rewrite     = rewrite
)
