package inspect

// LookAt has the queries look at so many rows that do not say it themselves.
func (r *Reader) LookAt(rows int) { r.look = looks{rows, rows, rows} }
