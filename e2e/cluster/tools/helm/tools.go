//go:build tools

// Package tools names the program that the tests of the chart run, so that go.mod and go.sum pin all it needs.
package tools

import _ "helm.sh/helm/v4/cmd/helm"
