package store

type Session struct{ mode, Rows any }

func (s *Session) Run() error {
	tell(s.mode == ownTx, s.Rows != nil)
	many := !s.IsRouted() && s.memory != nil
	if err := s.LeavesOutHeld(); err != nil {
		return err
	}
	query(`
		SELECT 1
		FROM rows`, "UPDATE rows SET value = 1", "SELECTED", "select a limit")
	return nil
}
