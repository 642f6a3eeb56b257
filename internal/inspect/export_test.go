package inspect

// LookAt sets the number of rows to read for queries without a bound of their own.
func (r *Reader) LookAt(rows int) { r.look = looks{rows, rows, rows} }
