// Package postgrestest finds a Postgres server, or starts one, and gives every test a database of
// its own. Tests, examples and the demo use it; the limiter itself never does.
//
// # Finding a server
//
// The package uses the first of these that answers:
//
//  1. The server that RATELIMIT_DATABASE_URL names, or DATABASE_URL. If one of them is set, nothing else is tried, except for a
//     server that a test needs for itself. This package changes only databases that it creates, so the role must be allowed to
//     create databases.
//  2. Server programs on this machine, started on a free port in a temporary directory. RATELIMIT_POSTGRES_BINDIR names their
//     directory. If it is not set, the package looks at pg_config, /usr/lib/postgresql and similar directories, PATH, and the
//     directories of Homebrew. If this process is root, the server runs as the user postgres, or as the user `nobody`.
//
// Package ratelimittest/postgres, a module of its own, goes on to a container and to programs that npm fetches. Its
// command run gives the URL of such a server to a command, for example to go test.
//
// # A server of this package
//
// The server listens on the loopback interface. The superuser postgres needs no password, so any user of this machine
// can connect while it runs. Other roles need their passwords.
//
// A test's database is a clone of the template. From Postgres 15 on the server copies the template's files, unless
// fsync is on.
//
// # Settings
//
// RATELIMIT_SETTINGS names settings of Postgres for every database and every server of a test, for example
// RATELIMIT_SETTINGS=jit=on,jit_above_cost=0. A value that a test sets for its own server or session takes precedence.
//
// # Cleanup
//
// Nothing stays of a server that this package started. It stops when the process ends, even if the process is killed,
// and its directory is deleted: a small shell waits on a pipe that the process keeps open.
//
// On a server named by URL, the database of a test is dropped if the test passes, and kept if it fails. The template
// database stays, one for each state of the migrations.
//
// # PgBouncer
//
// [StartPgBouncer] starts a PgBouncer in front of a test's database, if the program is in PATH or where packages
// install it. It ends as the servers do.
//
// # Without a server
//
// Without a server a test is skipped, with the whole reason. If CI is set, it fails. If a variable asks for a server
// that cannot be used, tests fail everywhere. RATELIMIT_NO_POSTGRES, which the command run sets, says that there is
// none and names the file for the list of skipped tests.
package postgrestest
