package cli

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/rules"
)

func (a *app) rulesConvert() *cobra.Command {
	var path string
	cmd := a.command(cobra.Command{
		Use:   "convert",
		Short: "Convert a file of another form to a rules file",
		Long: `Convert a file of one of two other forms to a rules file, for validate, diff, apply and simulate. It uses no database. It notes
what programs must declare, such as the attributes in keys. The forms are records with name, limit_keys and
algorithm_config, and records with key_pattern, scope and plan; see go doc rules.Convert.`,
		Args:    noArguments,
		Example: "  ratelimit rules convert -f limits.json > rules.yaml",
	}, func(ctx context.Context, _ []string) error {
		document, err := a.converted(ctx, path)
		if err != nil {
			return err
		}
		a.noteMistakes(document)
		if !a.isTable() {
			return a.show(document, nil)
		}
		file, err := document.YAML()
		if err == nil {
			_, err = a.out.Write(file)
		}
		return err
	}, "0 done")
	cmd.Flags().StringVarP(&path, "file", "f", "", "file in YAML or JSON (required); - is standard input")
	return a.withOutput(cmd)
}

// converted returns the content of a file of another form.
func (a *app) converted(ctx context.Context, path string) (*rules.Document, error) {
	var in io.Reader
	switch path {
	case "":
		return nil, misused("no file is named; give -f limits.json, or -f - for standard input")
	case standardInput:
		in = endsWith(ctx, a.in)
	default:
		file, err := os.Open(path)
		if err != nil {
			return nil, misused("%w", err)
		}
		defer file.Close()
		in = file
	}
	document, err := rules.Convert(in)
	if err != nil && ctx.Err() == nil {
		err = misused("%w", fmt.Errorf("%s: %w", fileName(path), err))
	}
	return document, err
}
