-- Lock those of some reservations that are open and past their end, to the end of the transaction, and return them
-- with now_us, the oldest first. Those that somebody else has locked are left out: nobody is waited for.
--
-- $1 id[], $2 as_of_us
SELECT r.id::text, r.state, r.ready_us, r.stale_us, r.started_us, r.expires_us, r.release,
    r.names, r.keys, r.costs, r.capacities, r.rates, r.steps, r.step_us, r.phase_us, r.lowest, r.shards, r.plans, r.calendars, r.prices, r.paid_us,
    coalesce($2::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us
FROM ratelimit.reservations AS r
WHERE r.id = ANY ($1::uuid[]) AND r.state = 'open'
    AND r.expires_us < coalesce($2::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint)
ORDER BY r.expires_us, r.id
FOR UPDATE SKIP LOCKED
