-- When the windows of a calendar begin in the time zone that is set, around the year of now. No table is read.
--
-- $1 days, $2 months          how long a window is: one of them is 0
-- $3 weekday                  the first day of a week, from 0, a Sunday: for windows of 7 days
-- $4 month, $5 day            the first day of windows of months, from 1; in a month that is shorter, its last
-- $6 first, $7 last           the windows, counted from the begin of the year
-- $8 as_of_us                 in place of the database's clock, when it is not null
--
-- Returns now_us; the zone; the instants from_us at which windows begin whose length step_us is another than that of those
-- before; and until_us, when the last one ends.
--
-- A midnight is converted at once when no clock is changed within a day of it. Else the first instant counts at which the
-- local time is as late: with the offset of the day before, or of the day after, or, where neither of them gives
-- midnight because it is left out, the second after which it is.
WITH clock AS MATERIALIZED (
    SELECT n.now_us, date_trunc('year', (timestamptz '1970-01-01 00:00:00+00' + n.now_us * interval '1 microsecond')::timestamp) AS year
    FROM (SELECT coalesce($8::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint) AS now_us) AS n
), midnight AS MATERIALIZED (
    SELECT CASE
        WHEN $2::integer = 0 THEN c.year + make_interval(days => k * $1::integer
            - CASE WHEN $1::integer = 7 THEN (extract(dow FROM c.year)::integer - $3::integer + 7) % 7 ELSE 0 END)
        ELSE m.first + make_interval(days =>
            least($5::integer, extract(day FROM m.first + interval '1 month' - interval '1 day')::integer) - 1)
        END AS local
    FROM clock AS c, generate_series($6::integer, $7::integer) AS k,
        LATERAL (SELECT c.year + make_interval(months => $4::integer - 1 + k * $2::integer) AS first) AS m
), guess AS MATERIALIZED (
    SELECT m.local, m.local::timestamptz AS at FROM midnight AS m
), near AS MATERIALIZED (
    SELECT g.local, g.at, (g.at - interval '30 hours')::timestamp = g.local - interval '30 hours'
        AND (g.at + interval '30 hours')::timestamp = g.local + interval '30 hours' AS same,
        g.local - ((g.at - interval '30 hours')::timestamp - (g.at - interval '30 hours') AT TIME ZONE 'UTC') AS before,
        g.local - ((g.at + interval '30 hours')::timestamp - (g.at + interval '30 hours') AT TIME ZONE 'UTC') AS after
    FROM guess AS g
), candidate AS MATERIALIZED (
    SELECT n.local, n.before, n.after, CASE WHEN n.same THEN n.at ELSE (
        SELECT min(c.at) FROM (VALUES (n.before AT TIME ZONE 'UTC'), (n.after AT TIME ZONE 'UTC')) AS c (at) WHERE c.at::timestamp >= n.local) END AS at
    FROM near AS n
), window_begin AS MATERIALIZED (
    SELECT DISTINCT (extract(epoch FROM CASE WHEN (c.at - interval '1 second')::timestamp < c.local THEN c.at ELSE (
        SELECT min(s.at) FROM generate_series(least(c.before, c.after) AT TIME ZONE 'UTC', c.at, interval '1 second') AS s (at)
        WHERE s.at::timestamp >= c.local) END) * 1000000)::bigint AS at
    FROM candidate AS c
), length AS (
    SELECT b.at, lead(b.at) OVER (ORDER BY b.at) - b.at AS step FROM window_begin AS b
), run AS (
    SELECT l.at, l.step, lag(l.step) OVER (ORDER BY l.at) AS before FROM length AS l WHERE l.step IS NOT NULL
)
SELECT (SELECT c.now_us FROM clock AS c), current_setting('TimeZone'),
    array_agg(r.at ORDER BY r.at) FILTER (WHERE r.step IS DISTINCT FROM r.before) AS from_us,
    array_agg(r.step ORDER BY r.at) FILTER (WHERE r.step IS DISTINCT FROM r.before) AS step_us,
    max(r.at + r.step) AS until_us
FROM run AS r
