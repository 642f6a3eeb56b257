package bucket

import "cmp"

// Key names one row of a bucket, as the primary key of the table does.
type Key struct {
	// Name is the limit's name.
	Name string
	// Key says whose bucket it is, as stored: "" for the bucket that everybody shares.
	Key string
	// Shard is the number of the row, from 0 on: 0 for a bucket on one row.
	Shard int32
}

// Compare returns -1 if k comes before o, 1 if it comes after it, and 0 if they are the same. It is the order of the primary key,
// which compares bytes. Every call locks its rows in this order, so no two calls can wait for each other.
func (k Key) Compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Name, o.Name), cmp.Compare(k.Key, o.Key), cmp.Compare(k.Shard, o.Shard))
}

// Whole returns the key of the bucket of the row: the key of its first row.
func (k Key) Whole() Key {
	k.Shard = 0
	return k
}
