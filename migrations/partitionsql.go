package migrations

import (
	"bytes"
	"fmt"
	"strconv"
)

// partitionStatement copies the table of buckets into $N partitions, by a hash of the name and the key; 1 is one plain table. The
// copy has the same rows, columns, checks, indexes, comments, owner and grants, and each partition has the storage parameters.
// Grants are on the whole table only. Default privileges of the current role grant nothing on the partitions.
//
// It uses DefaultSchema, as the files do. It builds the index after it has copied the rows, in a third of the time.
const partitionStatement = `DO $partition$
DECLARE
    modulus CONSTANT integer := $N;
    whole regclass := 'ratelimit.buckets'::regclass;
    leaf pg_catalog.pg_class;
    owner CONSTANT text := (SELECT c.relowner::regrole FROM pg_catalog.pg_class c WHERE c.oid = whole);
    acl CONSTANT aclitem[] := (SELECT c.relacl FROM pg_catalog.pg_class c WHERE c.oid = whole);
    said CONSTANT text := pg_catalog.obj_description(whole, 'pg_class');
    constraints CONSTANT text[] := ARRAY(
        SELECT format('ALTER TABLE ratelimit.buckets ADD CONSTRAINT %I %s', k.conname, pg_catalog.pg_get_constraintdef(k.oid))
        FROM pg_catalog.pg_constraint k WHERE k.conrelid = whole AND k.contype IN ('p', 'u', 'x') ORDER BY k.conname);
    indexes CONSTANT text[] := ARRAY(
        SELECT replace(pg_catalog.pg_get_indexdef(i.indexrelid), ' ON ONLY ', ' ON ')
        FROM pg_catalog.pg_index i WHERE i.indrelid = whole AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint k WHERE k.conindid = i.indexrelid)
        ORDER BY i.indexrelid);
    settings text;
    place text := '';
    one record;
    made regclass;
BEGIN
    SELECT c.* INTO leaf FROM pg_catalog.pg_class c
    WHERE c.oid = coalesce((SELECT min(p.relid::oid) FROM pg_catalog.pg_partition_tree(whole) p WHERE p.isleaf), whole);
    SELECT string_agg(o.text, ', ') INTO settings FROM (
        SELECT unnest(leaf.reloptions) AS text
        UNION ALL SELECT 'toast.' || unnest(t.reloptions) FROM pg_catalog.pg_class t WHERE t.oid = leaf.reltoastrelid) AS o;
    settings := coalesce('WITH (' || settings || ')', '');
    SELECT format(' TABLESPACE %I', s.spcname) INTO place FROM pg_catalog.pg_tablespace s WHERE s.oid = leaf.reltablespace;
    settings := settings || coalesce(place, '');

    FOR one IN SELECT i.indexrelid::regclass AS name FROM pg_catalog.pg_index i WHERE i.indrelid = whole LOOP
        EXECUTE format('ALTER INDEX %s RENAME TO %I', one.name, 'was_' || one.name::oid);
    END LOOP;
    ALTER TABLE ratelimit.buckets RENAME TO buckets_was;
    EXECUTE format('CREATE %s TABLE ratelimit.buckets (LIKE ratelimit.buckets_was INCLUDING ALL EXCLUDING INDEXES) %s',
        CASE WHEN leaf.relpersistence = 'u' AND modulus = 1 THEN 'UNLOGGED' END, CASE WHEN modulus = 1 THEN settings ELSE 'PARTITION BY HASH (name, key)' END);
    IF modulus > 1 THEN
        FOR i IN 0 .. modulus - 1 LOOP
            EXECUTE format('CREATE %s TABLE ratelimit.%I PARTITION OF ratelimit.buckets FOR VALUES WITH (MODULUS %s, REMAINDER %s) %s',
                CASE WHEN leaf.relpersistence = 'u' THEN 'UNLOGGED' END, format('buckets_%s_of_%s', i, modulus), modulus, i, settings);
        END LOOP;
    END IF;
    INSERT INTO ratelimit.buckets SELECT * FROM ratelimit.buckets_was;
    FOR i IN 1 .. cardinality(constraints) LOOP
        EXECUTE constraints[i];
    END LOOP;
    FOR i IN 1 .. cardinality(indexes) LOOP
        EXECUTE indexes[i];
    END LOOP;

    made := 'ratelimit.buckets'::regclass;
    EXECUTE 'COMMENT ON TABLE ratelimit.buckets IS ' || coalesce(quote_literal(said), 'NULL');
    FOR one IN
        SELECT c.oid::regclass AS name, c.relowner::regrole::text AS owner,
            ARRAY(SELECT DISTINCT a.grantee FROM pg_catalog.aclexplode(c.relacl) a WHERE a.grantee <> c.relowner) AS grantees
        FROM pg_catalog.pg_class c
        WHERE c.oid = made OR c.oid IN (SELECT p.relid FROM pg_catalog.pg_partition_tree(made) p)
    LOOP
        FOR i IN 1 .. cardinality(one.grantees) LOOP
            EXECUTE format('REVOKE ALL ON %s FROM %s', one.name, CASE WHEN one.grantees[i] = 0 THEN 'PUBLIC' ELSE one.grantees[i]::regrole::text END);
        END LOOP;
        IF one.owner <> owner THEN
            EXECUTE format('ALTER TABLE %s OWNER TO %s', one.name, owner);
        END IF;
    END LOOP;
    FOR one IN
        SELECT a.privilege_type AS may, '' AS of, a.grantee, a.is_grantable FROM pg_catalog.aclexplode(acl) a
        UNION ALL
        SELECT a.privilege_type, format('(%I)', t.attname), a.grantee, a.is_grantable
        FROM pg_catalog.pg_attribute t, pg_catalog.aclexplode(t.attacl) a WHERE t.attrelid = whole AND t.attacl IS NOT NULL
    LOOP
        EXECUTE format('GRANT %s %s ON ratelimit.buckets TO %s %s', one.may, one.of, CASE WHEN one.grantee = 0 THEN 'PUBLIC' ELSE one.grantee::regrole::text END,
            CASE WHEN one.is_grantable THEN 'WITH GRANT OPTION' END);
    END LOOP;
    DROP TABLE ratelimit.buckets_was;
END $partition$`

// partition returns the statement for a schema and a number of partitions.
func partition(schema string, partitions int) string {
	return string(rewrite(partitionInto(partitions), schema))
}

func partitionInto(partitions int) []byte {
	return bytes.ReplaceAll([]byte(partitionStatement), []byte("$N"), []byte(strconv.Itoa(partitions)))
}

// bucketsFile is the file that creates the table of buckets.
const bucketsFile = "00001_limits.sql"

// withPartitions returns bucketsFile with a statement at its end that makes the partitions in the same transaction.
func withPartitions(content []byte, partitions int) []byte {
	const downMarker = "-- +goose Down"
	up, down, _ := bytes.Cut(content, []byte(downMarker))
	return fmt.Appendf(nil, "%s-- +goose StatementBegin\n%s;\n-- +goose StatementEnd\n\n%s%s", up, partitionInto(partitions), downMarker, down)
}
