package doctor

// Known returns the tables that the checks expect, with their settings as name=value.
func Known() (version int64, tables map[string][]string) {
	tables = make(map[string][]string)
	for _, t := range knownTables() {
		var settings []string
		for _, s := range t.settings {
			settings = append(settings, s.name+"="+s.value)
		}
		tables[t.name] = settings
	}
	return newestVersion, tables
}
