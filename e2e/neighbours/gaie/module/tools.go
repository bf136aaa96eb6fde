//go:build tools

// Package tools names the suite and the server that its tests talk to, so that go.mod and go.sum pin all they need.
package tools

import (
	_ "sigs.k8s.io/gateway-api-inference-extension/conformance"
	_ "sigs.k8s.io/gateway-api/conformance/echo-basic"
)
