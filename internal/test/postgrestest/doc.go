// Package postgrestest finds a Postgres server, or starts one from installed programs, and gives every test a database
// of its own: a clone of a template, which is made once for each state of the migrations.
//
// The server is the one that RATELIMIT_DATABASE_URL names, or DATABASE_URL; this package changes only databases that it
// creates there. Otherwise it is started on a free port in a temporary directory, from RATELIMIT_POSTGRES_BINDIR or
// where packages install the programs, as the user postgres or nobody if this process is root. The superuser needs no
// password, other roles do. Package ratelimittest/postgres, a module of its own, goes on to a container and to programs
// that npm fetches, and its command run gives such a server to go test.
//
// Nothing stays of a server that was started: a small shell waits on a pipe that the process keeps open, so it stops
// the server and deletes its directory even if the process is killed. On a server named by URL, the database of a
// failed test is kept.
//
// RATELIMIT_SETTINGS names settings for every database and server of a test, for example jit=on,jit_above_cost=0.
//
// Without a server a test is skipped, with the whole reason. It fails if CI is set, or if a variable asks for a server
// that cannot be used. With RATELIMIT_NO_POSTGRES, which the command run sets, no server is looked for.
package postgrestest
