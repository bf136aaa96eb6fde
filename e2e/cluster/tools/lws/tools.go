//go:build tools

// Package tools names the manager that the tests of replicas that span nodes run, so that go.mod and go.sum pin all it needs.
package tools

import _ "sigs.k8s.io/lws/cmd"
