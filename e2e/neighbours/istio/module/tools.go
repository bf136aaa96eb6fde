//go:build tools

// Package tools names Istio's control plane, so that go.mod and go.sum pin all it needs.
package tools

import _ "istio.io/istio/pilot/cmd/pilot-discovery"
