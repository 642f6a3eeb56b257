package cli

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// definition is how a limit is defined in the code, as far as it was said, and the plan of the key.
type definition struct {
	plan, policy string
	noPlan       bool
}

func (a *app) withDefinition(cmd *cobra.Command, d *definition) *cobra.Command {
	cmd.Flags().StringVar(&d.policy, "policy", "", "definition in the code, such as 'rate: 10, period: minute'; see "+
		"ratelimit help policies")
	return cmd
}

// errNoDefinition is returned where nothing says how a limit is defined.
var errNoDefinition = errors.New("no definition is given")

// of returns the definition of the limit of this name. Without a definition it returns errNoDefinition.
func (d *definition) of(name string) (ratelimit.Limit, error) {
	if d.policy == "" {
		return ratelimit.Limit{}, errNoDefinition
	}
	policy, err := parsePolicy(d.policy)
	if err != nil {
		return ratelimit.Limit{}, err
	}
	return ratelimit.NewLimit(name, policy)
}

// parsePolicy returns what --policy says.
func parsePolicy(text string) (ratelimit.Policy, error) {
	policy, err := rules.ParsePolicy(text)
	if err != nil {
		return nil, misused("--policy %.200q: %s; write it as in a rules file, such as 'rate: 10, period: minute'", text,
			strings.TrimPrefix(err.Error(), rules.ErrInvalid.Error()+": "))
	}
	return policy, nil
}

// check returns an error if the name or the definition is invalid for every bucket.
func (d *definition) check(name string) error {
	if _, err := ratelimit.NewLimit(name, ratelimit.PerSecond(1)); err != nil {
		return err
	}
	if _, err := d.of(name); !errors.Is(err, errNoDefinition) {
		return err
	}
	return nil
}

// checkPlan returns an error where the limit has rules for plans, and the flags do not choose one of them: under the
// rule of another plan a command would cut the bucket to that rule's capacity.
func (d *definition) checkPlan(name string, plans []string) error {
	if d.noPlan || len(plans) == 0 || slices.Contains(plans, d.plan) {
		return nil
	}
	return fmt.Errorf("the limit %q has rules for these plans: %s; give --plan with the one that the key is on, or "+
		"--no-plan if it is on none of them", name, strings.Join(plans, ", "))
}
