package cli

import (
	"cmp"
	"context"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// build is which build of the program this is.
type build struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitzero"`
	Time     string `json:"time,omitzero"`
	Modified bool   `json:"modified"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func buildOf() build {
	b := build{Version: "(unknown)", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	b.Version = cmp.Or(info.Main.Version, "(devel)")
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.time":
			b.Time = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}

func (a *app) versionCommand() *cobra.Command {
	return a.withOutput(a.command(cobra.Command{
		Use:     "version",
		Short:   "Show the version of this build",
		Long:    "Show the version of this build. It uses no database.",
		Args:    noArguments,
		Example: "  ratelimit version",
	}, func(context.Context, []string) error {
		b := buildOf()
		return a.show(b, func(t *table) {
			t.field("version", b.Version)
			t.field("revision", b.Revision)
			t.field("time", b.Time)
			if b.Modified {
				t.field("modified", "yes")
			}
			t.field("go", b.Go)
			t.field("platform", b.Platform)
		})
	}))
}
