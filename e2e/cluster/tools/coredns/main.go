// Command coredns is CoreDNS with what the testbed needs: upstream's own main takes in sixty plugins, and the client libraries of every cloud.
//
// A module of its own, so that its dependencies leave those of Kubernetes as they were released.
package main

import (
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() { coremain.Run() }
