package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/rules"
)

// validityView is whether a rules file is valid, for programs.
type validityView struct {
	File      string `json:"file"`
	Valid     bool   `json:"valid"`
	Says      string `json:"says,omitzero"` // what is wrong
	Rules     int    `json:"rules"`
	Tiers     int    `json:"tiers"`
	Overrides int    `json:"overrides"`
}

func (a *app) rulesValidate() *cobra.Command {
	var path string
	cmd := a.command(cobra.Command{
		Use:     "validate",
		Short:   "Check a rules file",
		Long:    "Check a rules file, and say what is wrong with it and in which line. It asks no database.",
		Args:    noArguments,
		Example: "  ratelimit rules validate -f rules.yaml",
	}, func(ctx context.Context, _ []string) error {
		document, err := a.wantedRules(ctx, path)
		switch {
		case errors.Is(err, rules.ErrInvalid):
			if a.options.format == asJSON {
				if err := a.show(validityView{File: path, Says: a.scrub(err.Error())}, nil); err != nil {
					return err
				}
			}
			return &exit{exitFault, err}
		case err != nil:
			return err
		}
		v := validityView{path, true, "", len(document.Rules), len(document.Tiers.Tiers), len(document.Overrides)}
		return a.show(v, func(t *table) {
			t.row(fmt.Sprintf("valid: %s has %s, %s and %s", fileName(path), count(v.Rules, "rule"), count(v.Tiers, "tier"), count(v.Overrides, "override")))
		})
	}, "0 valid", "5 not valid")
	cmd.Flags().StringVarP(&path, "file", "f", "", "rules file, in YAML or JSON (needed); - is standard input")
	return a.withOutput(cmd)
}
