CREATE SCHEMA llm;

-- A turn of a conversation: what a user asked, and what the model answered once its job has run.
CREATE TABLE llm.turns (
    id          text PRIMARY KEY,
    asker       text NOT NULL,
    prompt      text NOT NULL,
    max_tokens  bigint NOT NULL,
    estimate    bigint NOT NULL,
    allowance   text NOT NULL,                      -- the reservation of the user's and the plan's tokens
    asked_at    timestamptz NOT NULL DEFAULT now(),
    ready_at    timestamptz NOT NULL,               -- the moment promised when it was asked
    slot_at     timestamptz,                        -- the moment it was given in the end
    sent_at     timestamptz,
    answer      text,
    tokens      bigint                              -- what the upstream says it used
);
