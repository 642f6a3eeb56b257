//go:build generalpath

package integration_test

const generalPath = true
