package promlimit_test

import (
	"cmp"
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

type dashboard struct {
	UID    string `json:"uid"`
	Title  string `json:"title"`
	Panels []struct {
		ID      int    `json:"id"`
		Type    string `json:"type"`
		Title   string `json:"title"`
		GridPos struct{ H, W, X, Y int }
		Targets []struct {
			Expr string `json:"expr"`
		} `json:"targets"`
	} `json:"panels"`
	Templating struct {
		List []struct {
			Name       string `json:"name"`
			Definition string `json:"definition"`
		} `json:"list"`
	} `json:"templating"`
}

// queries returns the dashboard's queries by the title of their panel, and checks the panels without a query.
func queries(t *testing.T) map[string][]string {
	t.Helper()
	file, err := os.ReadFile("grafana.json")
	require.NoError(t, err)
	var d dashboard
	require.NoError(t, json.Unmarshal(file, &d))
	require.NotEmpty(t, d.UID)
	all, ids := map[string][]string{}, map[int]bool{}
	for _, p := range d.Panels {
		require.False(t, ids[p.ID], "panel %d is there twice", p.ID)
		ids[p.ID] = true
		require.LessOrEqual(t, p.GridPos.X+p.GridPos.W, 24, p.Title)
		require.Equal(t, p.Type == "row", len(p.Targets) == 0, p.Title)
		for _, target := range p.Targets {
			all[p.Title] = append(all[p.Title], target.Expr)
		}
	}
	for _, v := range d.Templating.List {
		if v.Definition != "" {
			all["variable "+v.Name] = []string{v.Definition}
		}
	}
	return all
}

var (
	metric  = regexp.MustCompile(`(ratelimit_[a-z_]+)(?:\{([^}]*)\})?`)
	matcher = regexp.MustCompile(`([a-z_]+)(?:=~|!=|!~|=)`)
	by      = regexp.MustCompile(`by \(([^)]*)\)`)
)

// requireExported requires that a query uses existing metrics and labels, and returns the metrics.
func requireExported(t *testing.T, metrics map[string][]string, where, expr string) (asked []string) {
	t.Helper()
	require.Equal(t, strings.Count(expr, "("), strings.Count(expr, ")"), expr)
	var labels []string
	for _, m := range metric.FindAllStringSubmatch(expr, -1) {
		name := m[1]
		if _, ok := metrics[name]; !ok {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				name = strings.TrimSuffix(name, suffix)
			}
		}
		labels = metrics[name]
		require.NotNil(t, labels, "%q asks for %s, which is not exported", where, name)
		asked = append(asked, name)
		for _, l := range matcher.FindAllStringSubmatch(m[2], -1) {
			isBound := l[1] == "le" && strings.HasSuffix(m[1], "_bucket")
			require.True(t, isBound || slices.Contains(labels, l[1]), "%q has no %q: %s", where, l[1], expr)
		}
	}
	for _, m := range by.FindAllStringSubmatch(expr, -1) {
		for l := range strings.SplitSeq(m[1], ", ") {
			require.True(t, l == "le" || slices.Contains(labels, l), "%q groups by %q: %s", where, l, expr)
		}
	}
	return asked
}

// TestDashboard promises that every query uses existing metrics and labels, and that every metric is in a query. Each
// result of a guard without a normal decision has a panel.
func TestDashboard(t *testing.T) {
	t.Parallel()
	metrics, asked, panels := exported(t), map[string]bool{}, queries(t)
	for panel, exprs := range panels {
		for _, expr := range exprs {
			for _, name := range requireExported(t, metrics, panel, expr) {
				asked[name] = true
			}
		}
	}
	for name := range metrics {
		require.True(t, asked[name], "no panel shows %s", name)
	}
	for panel, result := range map[string]string{
		"Undecided requests": "failed_(open|closed)", "Invalid requests": "bad_key", "Unlimited requests": "unlimited", "Refusals in shadow mode": "shadow_refused",
	} {
		require.Contains(t, strings.Join(panels[panel], " "), result, panel)
	}
}

// TestAlerts promises that the alerts use existing metrics, labels and values, and that each has a severity.
func TestAlerts(t *testing.T) {
	t.Parallel()
	file, err := os.ReadFile("alerts.yaml")
	require.NoError(t, err)
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert       string            `yaml:"alert"`
				Expr        string            `yaml:"expr"`
				For         string            `yaml:"for"`
				Labels      map[string]string `yaml:"labels"`
				Annotations map[string]string `yaml:"annotations"`
			} `yaml:"rules"`
		} `yaml:"groups"`
	}
	require.NoError(t, yaml.Unmarshal(file, &rules))
	metrics, scraped := exported(t), scrape(t, told(t))
	require.Len(t, rules.Groups, 1)
	require.NotEmpty(t, rules.Groups[0].Rules)
	for _, rule := range rules.Groups[0].Rules {
		require.NotEmpty(t, rule.Annotations["summary"], rule.Alert)
		require.Contains(t, []string{"critical", "warning", "info"}, rule.Labels["severity"], rule.Alert)
		require.NotEmpty(t, requireExported(t, metrics, rule.Alert, rule.Expr), rule.Alert)
		for _, m := range regexp.MustCompile(`(ratelimit_[a-z_]+)\{([a-z_]+="[^"]+")\}`).FindAllStringSubmatch(rule.Expr, -1) {
			exists := regexp.MustCompile(m[1] + `\{[^}]*` + regexp.QuoteMeta(m[2]))
			require.Regexp(t, exists, scraped, "%s never fires: no series has %s", rule.Alert, m[2])
		}
		requireFirstEvents(t, metrics, rule.Alert, rule.Expr, rule.For)
	}
}

var ranged = regexp.MustCompile(`(?:rate|increase)\((ratelimit_[a-z_]+?)(_bucket|_sum|_count)?(?:\{[^}]*\})?\[(\w+)\]`)

// requireFirstEvents requires that an alert sees the event with which a series begins, of which rate and increase know
// nothing. A series without labels begins at 0. An alert that needs its condition for the whole range or longer is
// about events that go on.
func requireFirstEvents(t *testing.T, metrics map[string][]string, alert, expr, holds string) {
	t.Helper()
	needed, err := time.ParseDuration(cmp.Or(holds, "0s"))
	require.NoError(t, err, alert)
	for _, m := range ranged.FindAllStringSubmatch(expr, -1) {
		name := m[1] + m[2]
		labels, isExported := metrics[name]
		if !isExported {
			labels = metrics[m[1]]
		}
		span, err := time.ParseDuration(m[3])
		require.NoError(t, err, alert)
		if len(labels) > 0 && needed < span {
			require.Regexp(t, `\b`+name+`(\{[^}]*\})? unless (last_over_time\()?`+name+`(\[\w+\])? offset `, expr, "%s misses the first event of a series of %s", alert, name)
		}
	}
}
