package migrations_test

import (
	"fmt"

	"github.com/pgratelimit/pgratelimit/migrations"
)

// What is printed goes into a migration of the application's own, or to psql.
func ExampleGrants() {
	statements, err := migrations.Grants(migrations.Config{}, migrations.Roles{Reader: "status_page"})
	if err != nil {
		panic(err)
	}
	fmt.Print(statements)
	// Output:
	// GRANT USAGE ON SCHEMA "ratelimit" TO "status_page";
	// GRANT SELECT ON "ratelimit"."buckets" TO "status_page";
	// GRANT SELECT ON "ratelimit"."reservations" TO "status_page";
	// GRANT SELECT ON "ratelimit"."fingerprint" TO "status_page";
	// GRANT SELECT ON "ratelimit"."rules" TO "status_page";
	// GRANT SELECT ON "ratelimit"."rules_version" TO "status_page";
	// GRANT SELECT ON "ratelimit"."refusals" TO "status_page";
	// GRANT SELECT ON "ratelimit"."prices" TO "status_page";
	// GRANT SELECT ON "ratelimit"."goose_db_version" TO "status_page";
}
