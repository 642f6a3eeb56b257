package doctor

// Known returns the tables that the checks expect: for each its primary key, its other indexes, and its settings as
// name=value.
func Known() (version int64, tables map[string][3][]string) {
	tables = make(map[string][3][]string)
	for _, t := range knownTables() {
		var settings []string
		for _, s := range t.settings {
			settings = append(settings, s.name+"="+s.value)
		}
		tables[t.name] = [3][]string{{t.key}, t.indexes, settings}
	}
	return newestVersion, tables
}
