package main

import (
	"context"
	"fmt"
	"net/http"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// counted is how many requests took from a limit by a rule, and how many that refused.
type counted struct{ took, refused int }

// scrape reads from /metrics what was counted of each rule.
func (p *play) scrape(ctx context.Context) (map[string]counted, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+"/metrics", http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := p.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(response.Body)
	if err != nil {
		return nil, fmt.Errorf("read /metrics: %w", err)
	}
	rules := map[string]counted{}
	for _, metric := range families["ratelimit_rule_requests_total"].GetMetric() {
		rule, n := rules[label(metric, "rule")], int(metric.GetCounter().GetValue())
		switch label(metric, "result") {
		case "allowed":
			rule.took += n
		case "refused", "shadow_refused":
			rule.refused += n
		}
		rules[label(metric, "rule")] = rule
	}
	return rules, nil
}

func label(metric *dto.Metric, name string) string {
	for _, pair := range metric.GetLabel() {
		if pair.GetName() == name {
			return pair.GetValue()
		}
	}
	return ""
}
