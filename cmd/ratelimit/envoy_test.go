package main

import (
	"encoding/json"
	"os"
	"testing"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ratelimit/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
)

// TestEnvoyConfiguration expects that Envoy knows every field of envoy.yaml, and accepts its values.
func TestEnvoyConfiguration(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("envoy.yaml")
	require.NoError(t, err)
	var parsed map[string]any
	require.NoError(t, yaml.Unmarshal(text, &parsed))
	data, err := json.Marshal(parsed)
	require.NoError(t, err)
	var bootstrap bootstrapv3.Bootstrap
	require.NoError(t, protojson.Unmarshal(data, &bootstrap))
	require.NoError(t, bootstrap.ValidateAll())
}
