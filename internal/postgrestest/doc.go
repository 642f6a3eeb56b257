// Package postgrestest finds a Postgres server, or starts one, and gives every test a database of
// its own. Tests, examples and the demo use it; the limiter itself never does.
//
// # Finding a server
//
// In this order, the first that answers is used:
//
//  1. The server that RATELIMIT_DATABASE_URL names, else DATABASE_URL. When one of them is set,
//     nothing else is tried. Only databases that this package creates are touched, so the role must
//     be allowed to create databases.
//  2. Server programs on this machine, started on a free port in a temporary directory: those in
//     RATELIMIT_POSTGRES_BINDIR when it is set, else what pg_config names, /usr/lib/postgresql and
//     its like, PATH, and Homebrew's places. It works as root too: the server then runs as the user
//     postgres, else nobody.
//  3. Docker, with the image RATELIMIT_POSTGRES_IMAGE, else postgres:17-alpine.
//  4. A server downloaded once into the user's cache directory by embedded-postgres.
//
// The last two are for command outside, in the directory below, which Go builds from its sources: it is a module of its own, and
// the tests that import this package ask for no more modules than the limiter does.
//
// RATELIMIT_POSTGRES=local, docker or embedded forces 2, 3 or 4, whatever else is set.
//
// # How a server begins
//
// A server of 2 or 4 begins from an image: the data directory of a stopped server that has the template database already, as one file in
// pgratelimit/clusters of the user's cache directory. The first server makes the image; others that start at the same time wait for it. The
// name of the image is a hash of the server programs (path, size, modification time), the arguments of initdb, RATELIMIT_PARTITIONS, the
// time zone, and the sources of the migrations and of this package. The ten images that were used last are kept. An image that is
// incomplete or damaged is made anew. If the cache directory cannot be used, or if the binary was built with -trimpath, initdb makes the
// data directory, which takes a second or two longer. Citus servers never begin from an image.
//
// The server listens on the loopback. It takes the superuser postgres without a password, so any user of this machine could connect while it
// runs. Other roles need their passwords.
//
// A test's database is a clone of the template. From Postgres 15 on the server copies the template's files, unless fsync is on.
//
// # Settings
//
// RATELIMIT_SETTINGS names settings of Postgres that every database and every server of a test has, as in
// RATELIMIT_SETTINGS=jit=on,jit_above_cost=0. A test that sets one of them for its own server or session has its own value.
//
// # What is left behind
//
// Nothing. A server that this package started stops when the process ends, however it ends, and its
// directory goes with it: a small shell waits on a pipe that the process holds open. Containers are
// removed by command outside, when its input ends, and else by the reaper of testcontainers-go. That is an image to be
// had, too; where it cannot be, TESTCONTAINERS_RYUK_DISABLED=true does without it. On a server
// named by URL, each test's database is dropped when the test passes, and kept for a look when it
// fails; only the template database that the others are cloned from stays, one for each state of the
// migrations.
//
// # PgBouncer
//
// [StartPgBouncer] puts one in front of a test's database, where the program is in PATH or where packages put it. It ends as the
// servers do.
//
// # Servers that fail
//
// [StartWith] starts a server on a disk that a test can fill, or by a [Clock] that it sets while the server runs, for which libfaketime
// has to be there; [Server.StartStandby] starts a replica of one. They are of programs of this machine.
//
// # Without a server
//
// A test is skipped, with the whole reason, on a developer's machine, and fails when CI is set. What
// somebody asked for by a variable and did not get is a failure in both.
package postgrestest
