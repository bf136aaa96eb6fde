"""A Kubernetes node without containers: it runs the pods bound to it as local processes and reports them as a kubelet would.

Each pod gets a network namespace of its own, with an address on the bridge. Each container gets a mount namespace of its own:
the machine's root as a read-only lower layer under a private writable one (overlayfs), with the pod's volumes bound in, so that
nothing a pod writes outside a hostPath touches the machine.

It does: command, args, env (valueFrom, envFrom), init containers and sidecars, startup, readiness and liveness probes,
postStart and preStop hooks, termination grace, restartPolicy with back-off, readiness gates, Events, extended resources, and
the volumes emptyDir, hostPath, claims of hostPath volumes, configMap, secret, downwardAPI and projected (so service account
tokens work), and termination messages from a file or from the log.

It does not: pull images, limit cpu or memory, switch users, serve logs and exec, refresh volumes.
"""
