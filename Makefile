# Every target is safe to repeat; set-up runs only when a lock or the project file has changed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
UV_VERSION := 0.13.8
PROTOS := gateway/penstock/gateway/_pb/.stamp
SETUP := $(VENV)/.setup

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

$(UV):
	@echo "==> creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or later")'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(SETUP): pyproject.toml requirements/dev.txt | $(UV)
	@echo "==> installing the locked dependencies (torch is large: about half a minute on a fast line)"
	@$(UV) pip install --python $(BIN)/python --require-hashes -r requirements/dev.txt
	@$(UV) pip install --python $(BIN)/python --quiet --no-deps -e .
	@touch $@

$(PROTOS): gateway/protogen.py requirements/protogen.txt | $(SETUP)
	@echo "==> generating the Envoy protobuf package"
	@$(UV) venv --quiet --allow-existing .tools/protogen
	@$(UV) pip install --quiet --python .tools/protogen/bin/python --require-hashes -r requirements/protogen.txt
	@.tools/protogen/bin/python gateway/protogen.py $(@D)
	@touch $@

.PHONY: setup
setup: $(SETUP) $(PROTOS) ## install everything into .venv and generate what is generated

.PHONY: up demo
up: setup ## start the local system and show it working; Ctrl-C stops it
	@$(BIN)/penstock up -f examples/tiny.yaml

demo: setup ## the same, ask one question through the gateway, and stop
	@$(BIN)/penstock demo -f examples/tiny.yaml

.PHONY: test e2e e2e-build gpu requirements
test: setup ## every test that needs no GPU and no cluster
	@$(BIN)/python -m pytest -m "not gpu"

e2e-build: setup ## build the Kubernetes control plane from its Go modules (once, about six minutes)
	@$(BIN)/python -m e2e.cluster build

e2e: e2e-build ## the cluster tier: a real Kubernetes control plane, pods as processes
	@$(BIN)/python -m pytest e2e

gpu: setup ## what needs a CUDA device (skips by name elsewhere)
	@$(BIN)/python -m pytest -m gpu

requirements: setup ## which requirement rows have a test
	@$(BIN)/python docs/requirements/coverage.py

.PHONY: fuzz
fuzz: setup ## the scheduler against a naive one, a million random steps
	@$(BIN)/python engine/tests/core/scheduler_fuzzer.py

.PHONY: bench-scheduler
bench-scheduler: setup ## the scheduler's own time a step, at 1 to 1,024 running decodes
	@$(BIN)/python benchmarks/bench_scheduler.py

.PHONY: bench-engine
bench-engine: setup ## one engine on a CPU: tokens a second and a CPU second, beside transformers
	@$(BIN)/python benchmarks/bench_engine.py

.PHONY: bench-prefix-cache
bench-prefix-cache: setup ## hit rate on a real trace (TRACE=…), beside a radix tree's
	@$(BIN)/python benchmarks/bench_prefix_cache.py $(if $(TRACE),--trace $(TRACE))

.PHONY: bench-requests
bench-requests: setup ## what a request costs the frontend before the engine has it
	@$(BIN)/python benchmarks/bench_requests.py

.PHONY: bench-egress
bench-egress: setup ## what a token costs the frontend, and tokens sampled past a stop string
	@$(BIN)/python benchmarks/bench_egress.py

.PHONY: bench-gateway
bench-gateway: setup ## what the picker adds to a request: latency and CPU, against Envoy alone
	@$(BIN)/python benchmarks/bench_gateway.py

.PHONY: bench-client
bench-client: setup ## what the load generator of `penstock bench` itself costs a token
	@$(BIN)/python benchmarks/bench_client.py

.PHONY: bench-soak
bench-soak: setup ## does a replica leak? Half an hour of mixed traffic, aborts and kills (ARGS="--minutes 1": a smoke test)
	@$(BIN)/python benchmarks/bench_soak.py $(ARGS)

.PHONY: lint types format lock
lint: setup ## ruff and the import contracts
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports

types: setup ## pyright, strict on the pure cores
	@$(BIN)/pyright

format: setup ## format and fix what can be fixed
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

COMPILE := $(UV) pip compile --quiet --upgrade --generate-hashes --no-emit-index-url --universal --python-version 3.11 \
	--constraint requirements/constraints.txt --custom-compile-command "make lock"
lock: | $(UV) ## pin and hash the dependencies anew
	@for extra in engine gateway operator client dev; do $(COMPILE) --extra $$extra pyproject.toml -o requirements/$$extra.txt; done
	@$(COMPILE) requirements/protogen.in -o requirements/protogen.txt
