package admin

// Routes returns the last elements of the paths of the pages that are read, and of the forms that are sent.
func (h *Handler) Routes() (read, sent, changes []string) {
	for name, route := range h.routes {
		if route.get != nil {
			read = append(read, name)
		}
		if route.post != nil {
			sent = append(sent, name)
		}
		if route.changes {
			changes = append(changes, name)
		}
	}
	return read, sent, changes
}

// The words of the pages.
var (
	Number = number
	Span   = span
	Spell  = func(key string) (text string, codes []string) {
		for _, g := range spell(key) {
			if g.Code {
				codes = append(codes, g.Text)
			} else {
				text += g.Text
			}
		}
		return text, codes
	}
)
