-- The application's own tables. They stand in the same database as the limits, which is what lets a
-- sign-in create its session and reset its limit in one transaction.
CREATE SCHEMA login;

CREATE TABLE login.users (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    login         text COLLATE "C" NOT NULL UNIQUE, -- in the form accountOf returns
    password_hash text NOT NULL
);

CREATE TABLE login.sessions (
    token_hash bytea PRIMARY KEY, -- SHA-256 of the token: who reads this table can sign in as nobody
    user_id    bigint NOT NULL REFERENCES login.users ON DELETE CASCADE,
    expires_at timestamptz NOT NULL
);
