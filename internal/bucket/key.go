package bucket

import "cmp"

// Key names one row of a bucket, as the primary key of the table does.
type Key struct {
	// Name is that of the limit.
	Name string
	// Key says whose bucket it is, as stored: "" for the bucket that everybody shares.
	Key string
	// Shard is the number of the row, from 0 on: 0 for a bucket on one row.
	Shard int32
}

// Compare returns -1 when k comes before o, 1 when it comes after it, and 0 when they are the same. The order is that
// of the primary key, which compares bytes, and so the order in which every call locks its rows: no two of them can
// wait for each other.
func (k Key) Compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Name, o.Name), cmp.Compare(k.Key, o.Key), cmp.Compare(k.Shard, o.Shard))
}

// Whole returns the key of the bucket that the row belongs to: that of its first row.
func (k Key) Whole() Key {
	k.Shard = 0
	return k
}
