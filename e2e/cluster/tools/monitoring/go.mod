module penstock.dev/e2e/monitoring

go 1.26.0

require github.com/prometheus-operator/prometheus-operator v0.85.0
