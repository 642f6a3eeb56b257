package cli

import (
	"context"
	"io"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/doctor"
	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/simulate"
	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/rules"
)

// Pools keeps the pools of commands for later ones, because a session costs the server more than a command does.
type Pools struct {
	mu   sync.Mutex
	kept map[string]*pgxpool.Pool // by connection string
}

// Run is the function Run with pools that stay open.
func (p *Pools) Run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, env func(name string) string) int {
	return run(ctx, args, stdin, stdout, stderr, env, func(ctx context.Context, config *pgxpool.Config) (*pgxpool.Pool, func(), error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if pool := p.kept[config.ConnString()]; pool != nil {
			return pool, func() {}, nil
		}
		pool, _, err := open(ctx, config)
		if err != nil {
			return nil, nil, err
		}
		if p.kept == nil {
			p.kept = map[string]*pgxpool.Pool{}
		}
		p.kept[config.ConnString()] = pool
		return pool, func() {}, nil
	})
}

// Close closes the pools. It waits for connections that are in use.
func (p *Pools) Close() {
	for _, pool := range p.kept {
		pool.Close()
	}
}

// Root returns the commands of the program, for tests that walk them.
func Root() *cobra.Command {
	root := (&app{env: func(string) string { return "" }}).root()
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	return root
}

// Shown is shown.
func Shown(s string) string { return shown(s) }

// KeyText is keyText.
func KeyText(key string) string { return keyText(key) }

// Views are what -o json prints, by the names that docs/cli.md gives them.
func Views() map[string]any {
	return map[string]any{
		"`key`": keyView{}, "a limit of `key`": keyLimitView{}, "why `key` is refused": inspect.Refusal{},
		"`get`": bucketView{}, "one of the plans of `get`": inspect.PlanLevel{}, "what was seen of a bucket": inspect.Seen{}, "a row of a bucket": inspect.Row{}, "a minute of refusals": inspect.Minute{},
		"`check`, `take`": decisionView{}, "`reset`, `credit`": inspect.View{},
		"`pause`, `resume`":     changedView{},
		"`unlock`":              unlockedView{},
		"`rules diff`: of each": changeView{}, "`rules apply`": appliedView{}, "`rules history`: of each": rules.Statement{},
		"`top`: of each":               refusals.Sum{},
		"`reservations list`: of each": inspect.Reservation{}, "an item of a reservation": inspect.Item{},
		"a lease of `get`": inspect.Lease{}, "`leases release`": releasedView{}, "an upstream": inspect.Upstream{},
		"`reservations cancel`": cancelledView{}, "`rules validate`": validityView{},
		"`prune`": prunedView{}, "`migrate status`": migrationView{}, "`migrate up`, `migrate down`": migratedView{},
		"`simulate`": simulate.Report{}, "a limit of `simulate`": simulate.LimitReport{}, "a key of `simulate`": simulate.KeyReport{},
		"`doctor`": doctor.Report{}, "a finding": doctor.Finding{},
	}
}
