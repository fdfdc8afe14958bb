# Trimtab. `make help` lists the targets; each target sets up what it needs and is fast the second time.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export TRIMTAB_CACHE ?= $(HOME)/.cache/trimtab
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# OpenMP threads sleep early instead of spinning, as the server's do (engine-image/trimtab_engine/config/engine.py).
export GOMP_SPINCOUNT ?= 1000
CLUSTER_TOOL := $(PYTHON) e2e/cluster
DEV_TOOL := $(PYTHON) hack/dev
# One start time for all programs of one make; the last program prints the duration of each stage.
export TRIMTAB_BEGAN := $(or $(TRIMTAB_BEGAN),$(shell date +%s))
TOOK = ; code=$$?; $(DEV_TOOL) took; exit $$code
# DRY_RUN=1 prints what would be installed on this machine, and does nothing.
DRY := $(if $(filter-out 0,$(DRY_RUN)),--dry-run)
NODES = $(addprefix --workers ,$(WORKERS))
# Expected seconds on two idle cores, printed in advance.
TEST_SECONDS := 1500
# Most tests wait for processes that they start, so two jobs are nearly twice as fast as one, even on two cores.
TEST_JOBS ?= 2
E2E_SECONDS := 1700
DEMO_SECONDS := 250
MODEL ?= $(TRIMTAB_CACHE)/models/SmolLM2-135M-Instruct
NATIVE := kernels/trimtab_kernels/native
SOURCES := modelspec operator engine-image kernels simulator tests e2e
CRD := crds/trimtab.dev_inferencedeployments.yaml
CHART_CRD := charts/trimtab/files/crds/trimtab.dev_inferencedeployments.yaml

.DEFAULT_GOAL := help
.PHONY: help setup venv model cluster-up cluster-down images release check format test e2e demo bench bench-gpu bench-gpu-wheels test-gpu tune-gpu aot clients lives soak crds reference docs schema-current clean

.DEFAULT:
	@echo "make: no target '$@'; make help lists the targets" >&2; exit 2

help: ## this list
	@echo "Trimtab: make TARGET"
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

# One program sets up everything and reports its progress: hack/dev/set_up.py.
venv: ## virtual environment with all development dependencies
	@$(DEV_TOOL) set-up python

setup: ## virtual environment and model (SmolLM2-135M, in the cache, converted once)
	@$(DEV_TOOL) set-up python model

model: setup

check: venv ## format, lint, types, import contracts, docs, drift of CRD, chart and version (4 min)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests e2e/*.py
	$(BIN)/mypy -p cluster -p harness -p devtools -p offline -p dev
	$(BIN)/lint-imports
	$(BIN)/python -m trimtab_operator.resource.crd --check
	diff -u $(CRD) $(CHART_CRD)
	$(BIN)/python hack/adr_index.py --check
	$(BIN)/python hack/style.py --check
	$(BIN)/python hack/version.py --check
	$(BIN)/python hack/reference_docs.py --check
	$(MKDOCS) build --quiet --strict --site-dir build/site

format: venv ## format the sources and write the index of docs/adr
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python hack/adr_index.py

crds: venv ## write the CRD and the chart's copy of it from spec.py
	$(BIN)/python -m trimtab_operator.resource.crd --write
	cp $(CRD) $(CHART_CRD)

reference: venv ## write the generated pages of docs/reference from the CRD, flags and chart values
	$(BIN)/python hack/reference_docs.py

# MkDocs Material prints an advertisement about MkDocs 2 unless this is set.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
docs: venv ## the documentation site in build/site (SERVE=1: on http://127.0.0.1:8002, rebuilt on changes)
	$(MKDOCS) $(if $(SERVE),serve --dev-addr 127.0.0.1:8002,build --strict --site-dir build/site)

schema-current: venv ## CRD and validation errors on a current Kubernetes API server (6 min the first time, then 10 s)
	PYTHONPATH=e2e:hack $(BIN)/python e2e/current_schema.py

# Sets of strings have the same order in each run, so that failures are reproducible.
test: export PYTHONHASHSEED := 0
test: ## unit tests with a real model: no cluster, no network (25 min)
	@$(DEV_TOOL) set-up --for "make test" --then "the tests" --then-seconds $(TEST_SECONDS) $(DRY) python model
	@$(if $(DRY),,$(DEV_TOOL) stage --about $(TEST_SECONDS) tests -- $(BIN)/pytest tests --numprocesses $(TEST_JOBS) --dist loadfile --durations=10 $(TOOK))

cluster-up: ## create a kind cluster (12 min the first time, later 1 min; WORKERS=2: three nodes)
	@$(CLUSTER_TOOL) up $(NODES)

cluster-down: ## remove the kind cluster
	@$(CLUSTER_TOOL) down

# With a registry: the Dockerfiles in images/*/, by docker-bake.hcl. Without: images of this checkout for a kind cluster.
VERSION := $(shell cat VERSION)
ENGINE_TAG = $(VERSION)$(if $(GPU),,-cpu)
ifneq ($(REGISTRY),)
images:
	REGISTRY=$(REGISTRY) VERSION=$(VERSION) REVISION=$$(git rev-parse HEAD) \
	    docker buildx bake $(if $(PUSH),--push,--load) $(BAKE_FLAGS) $(if $(GPU),all,default)
	@echo "export OPERATOR_IMAGE=$(REGISTRY)/trimtab-operator:$(VERSION) ENGINE_IMAGE=$(REGISTRY)/trimtab-engine:$(ENGINE_TAG)"
	@echo "helm upgrade --install trimtab charts/trimtab --namespace trimtab-system --create-namespace --wait" \
	    "--set image.repository=$(REGISTRY)/trimtab-operator --set image.tag=$(VERSION)" \
	    "--set engine.image.repository=$(REGISTRY)/trimtab-engine --set engine.image.tag=$(ENGINE_TAG)"
else
images: setup ## engine, operator and model images for a local cluster (REGISTRY=… [GPU=1] [PUSH=1]: for a registry)
	@$(CLUSTER_TOOL) images
endif

release: ## wheel, sdist, chart, image list, SBOM, checksums and notes in dist/ (DRY_RUN=1: no signing, no push)
	$(PYTHON) hack/release.py $(if $(filter-out 0,$(DRY_RUN)),--dry-run)

# Some scenarios move replicas between nodes.
e2e soak: WORKERS ?= 2
# Independent scenarios run three at a time (e2e/harness/lanes.py); an existing cluster may have room for only one.
E2E_JOBS ?= $(if $(or $(filter current,$(CLUSTER)),$(filter 0 1,$(WORKERS))),1,3)
e2e: ## user scenarios on a kind cluster (30 min; CLUSTER=current: on KUBECONFIG's cluster)
	@$(DEV_TOOL) set-up $(NODES) --for "make e2e" --then "the scenarios" --then-seconds $(E2E_SECONDS) $(DRY) python model cluster images prometheus
	@$(if $(DRY),,$(DEV_TOOL) stage --about $(E2E_SECONDS) scenarios -- $(BIN)/pytest e2e $(if $(filter-out 1,$(E2E_JOBS)),--numprocesses $(E2E_JOBS)) --durations=15 $(TOOK))

demo: ## demo on a kind cluster, which is removed afterwards (KEEP=1: keep it, DRY_RUN=1: print what it would install)
	@$(DEV_TOOL) set-up $(NODES) --for "make demo" --then "the demo" --then-seconds $(DEMO_SECONDS) $(DRY) python model cluster images
	@$(if $(DRY),,PYTHONPATH=hack $(BIN)/python e2e/demo.py $(TOOK))

bench: setup ## CPU benchmarks, into docs/results/
	PYTHONPATH=engine-image:modelspec $(BIN)/python -m engine_benchmarks $(MODEL) --output docs/results $(addprefix --only ,$(ONLY))

aot: venv ## compile every GPU kernel for sm_80 to sm_100 without a GPU; results into docs/results/
	PYTHONPATH=kernels $(BIN)/python -m kernel_benchmarks.aot --cache $(TRIMTAB_CACHE)/aot --results docs/results $(addprefix --only ,$(ONLY))

# guidellm and aiperf pin packages that conflict with Trimtab's: each needs a separate virtual environment.
GUIDELLM ?= guidellm
AIPERF ?= aiperf
clients: setup ## guidellm and aiperf against the engine (skipped if not installed; GUIDELLM=, AIPERF=)
	PYTHONPATH=engine-image:modelspec $(BIN)/python -m engine_benchmarks.clients_bench $(MODEL) --guidellm $(GUIDELLM) --aiperf $(AIPERF)

# Uses the GPU machine's Python with torch (CUDA), triton, transformers and numpy; nothing is installed. Other imports of
# the engine come from build/wheels, which `make bench-gpu-wheels` fills on a machine with a package index.
BENCH_PYTHON ?= $(PYTHON)
BENCH_PYTHON_VERSION ?= 3.12
BENCH_WHEELS := msgspec pyzmq llguidance nvidia-ml-py jinja2 markupsafe cuda-bindings cuda-pathfinder
# A baseline that compiles its kernels there; the last small release (newer ones have 60 MB and more).
BENCH_PEER_WHEELS := flashinfer-python==0.5.3 apache-tvm-ffi==0.1.15.post2
bench-gpu-wheels: ## download the wheels that bench-gpu needs in addition to torch (BENCH_PYTHON_VERSION=3.12)
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(BENCH_PYTHON_VERSION) \
	    $(addprefix --platform manylinux,2014_x86_64 _2_28_x86_64 _2_31_x86_64) --dest build/wheels --constraint constraints.txt $(BENCH_WHEELS) $(BENCH_PEER_WHEELS)

# Triton compiles instead of interpreting. The options replace pyproject.toml's, whose plug-ins the machine may lack. With
# pytest-xdist several processes compile kernels, and a worker that loses the device is replaced. Each half is interrupted
# after GPU_SECONDS and then reports its results. Exit code 5: no test matched.
GPU_JOBS ?= 12
GPU_SECONDS ?= 270
GPU_PYTEST := PYTHONPATH=kernels:engine-image:modelspec TRITON_INTERPRET=0 timeout --signal=INT --kill-after=15 $(GPU_SECONDS) $(BENCH_PYTHON) -m kernel_benchmarks.wheels build/wheels pytest -q \
    -o addopts=--import-mode=importlib -W default -p no:cacheprovider -m "not cpu" --durations=5 $(addprefix -k ,$(ONLY))
test-gpu: ## tests of engine and kernels on this machine's GPU (10 min; ONLY=paged_decode)
	@PYTHONPATH=kernels $(BENCH_PYTHON) -m kernel_benchmarks.machine test-gpu
	@workers=$$($(BENCH_PYTHON) -c 'import xdist' 2>/dev/null && printf -- '-n '); \
	$(GPU_PYTEST) $${workers:+$$workers 1} tests/engine/cuda; engine=$$?; \
	$(GPU_PYTEST) $${workers:+$$workers $(GPU_JOBS)} tests/kernels \
	    $(addprefix --ignore=tests/kernels/,native kernel_benchmarks); kernels=$$?; \
	for code in $$engine $$kernels; do case $$code in 0|5) ;; *) exit $$code;; esac; done

# Folder for measurements, written as they are made.
OUTPUT ?= docs/results
bench-gpu: ## GPU benchmarks of kernels and engine, with baselines (10 min; ONLY=paged RESUME=1)
	@PYTHONPATH=kernels $(BENCH_PYTHON) -m kernel_benchmarks.machine bench-gpu
	@PYTHONPATH=kernels:engine-image:modelspec $(BENCH_PYTHON) -m kernel_benchmarks --output $(OUTPUT) $(addprefix --only ,$(ONLY)) $(if $(RESUME),--resume)

# Seconds per model.
TUNE_SECONDS ?= 200
TUNE_MODELS ?= llama-3.1-8b deepseek-v3
tune-gpu: ## tune fp8 GEMM launch configurations for this machine's GPU, into kernels/trimtab_kernels/configs (7 min)
	@PYTHONPATH=kernels $(BENCH_PYTHON) -m kernel_benchmarks.machine tune-gpu
	@for model in $(TUNE_MODELS); do PYTHONPATH=kernels $(BENCH_PYTHON) -m trimtab_kernels.tune kernels/kernel_benchmarks/shapes/$$model.json \
	    --batch-size 1 32 256 1024 4096 --budget-seconds $(TUNE_SECONDS) || [ $$? = 3 ] || exit 1; done

# Lives of each kind of scheduler: KV groups of two kinds (windows and all, chunks and all), images, short steps.
LIVES ?= 20000
lives: ## property tests of the scheduler with many more examples (1 h)
	$(BIN)/pytest tests/engine/scheduling/test_scheduler_properties.py -k Lives --lives $(LIVES)

soak: ## longer e2e scenarios and more examples of the property tests
	@$(DEV_TOOL) set-up $(NODES) python model cluster images prometheus
	$(BIN)/pytest tests/operator/reconcile/test_any_world.py tests/operator/reconcile/test_lagging_cache.py --worlds 10000 --timeout 1800
	$(BIN)/pytest tests --all -m soak
	$(BIN)/pytest e2e --soak

clean: ## remove everything that make created in the checkout
	rm -rf $(VENV) $(NATIVE)/compiled .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build dist
