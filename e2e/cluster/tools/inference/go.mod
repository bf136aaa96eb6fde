module penstock.dev/e2e/inference

go 1.26.0

require sigs.k8s.io/gateway-api-inference-extension v1.6.0
