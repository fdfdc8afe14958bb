# Trimtab. `make help` lists what there is; every target does its own set-up and is quick the second time.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export TRIMTAB_CACHE ?= $(HOME)/.cache/trimtab
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# The model's threads sleep soon instead of spinning, as the server's do (engine-image/trimtab_engine/config/engine.py).
export GOMP_SPINCOUNT ?= 1000
CLUSTER_TOOL := $(PYTHON) e2e/cluster
DEV_TOOL := $(PYTHON) hack/dev
# One clock for all programs of one make; the last of them says how long each stage took, whatever came of it.
export TRIMTAB_BEGAN := $(or $(TRIMTAB_BEGAN),$(shell date +%s))
TOOK = ; code=$$?; $(DEV_TOOL) took; exit $$code
# DRY_RUN=1 says what would be done to this machine, and does nothing.
DRY := $(if $(filter-out 0,$(DRY_RUN)),--dry-run)
NODES = $(addprefix --workers ,$(WORKERS))
# Seconds on two idle cores, for what is said beforehand.
TEST_SECONDS := 1020
# Most tests wait for processes that they start, so two at once are nearly twice as fast as one, on two cores too.
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
	@echo "there is no target '$@'; make help lists what there is" >&2; exit 2

help: ## this list
	@echo "Trimtab: make TARGET"
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

# Everything that is needed is made by one program, which says what it does: hack/dev/set_up.py.
venv: ## the virtual environment with everything that development needs
	@$(DEV_TOOL) set-up python

setup: ## virtual environment and model (SmolLM2-135M, in the cache, converted once)
	@$(DEV_TOOL) set-up python model

model: setup

check: venv ## format, lint, types, import contracts, CRD and chart drift, docs (4 min at most)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests e2e/*.py
	$(BIN)/mypy -p cluster -p harness -p devtools -p offline -p dev
	$(BIN)/lint-imports
	$(BIN)/python -m trimtab_operator.resource.crd --check
	diff -u $(CRD) $(CHART_CRD)
	$(BIN)/python hack/adr_index.py --check
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

schema-current: venv ## the CRD and all refusals before the code of a current API server (6 min the first time, then 10 s)
	PYTHONPATH=e2e:hack $(BIN)/python e2e/current_schema.py

# Sets of words have the same order in each run: what fails once fails again.
test: export PYTHONHASHSEED := 0
test: ## unit tests with the real model: no cluster, no network (20 min at most)
	@$(DEV_TOOL) set-up --for "make test" --then "the tests" --then-seconds $(TEST_SECONDS) $(DRY) python model
	@$(if $(DRY),,$(DEV_TOOL) stage --about $(TEST_SECONDS) tests -- $(BIN)/pytest tests --numprocesses $(TEST_JOBS) --dist loadfile --durations=10 $(TOOK))

cluster-up: ## a real Kubernetes cluster with kind (12 min the first time, about 1 min later; WORKERS=2: three nodes)
	@$(CLUSTER_TOOL) up $(NODES)

cluster-down: ## remove it
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

release: ## wheels, sdist, chart, image list, SBOM, checksums and notes in dist/ (DRY_RUN=1: signs and pushes nothing)
	$(PYTHON) hack/release.py $(if $(filter-out 0,$(DRY_RUN)),--dry-run)

# Some stories move replicas from node to node.
e2e soak: WORKERS ?= 2
# Three stories at once where none disturbs the others (e2e/harness/lanes.py); the nodes of a cluster of yours may have
# room for the engines of one alone.
E2E_JOBS ?= $(if $(or $(filter current,$(CLUSTER)),$(filter 0 1,$(WORKERS))),1,3)
e2e: ## every user story on a real cluster (30 min at most; CLUSTER=current uses KUBECONFIG's)
	@$(DEV_TOOL) set-up $(NODES) --for "make e2e" --then "the stories" --then-seconds $(E2E_SECONDS) $(DRY) python model cluster images prometheus
	@$(if $(DRY),,$(DEV_TOOL) stage --about $(E2E_SECONDS) stories -- $(BIN)/pytest e2e $(if $(filter-out 1,$(E2E_JOBS)),--numprocesses $(E2E_JOBS)) --durations=15 $(TOOK))

demo: ## from nothing to tokens to trim, and everything removed again (KEEP=1 leaves it up, DRY_RUN=1 only says what it does)
	@$(DEV_TOOL) set-up $(NODES) --for "make demo" --then "the story" --then-seconds $(DEMO_SECONDS) $(DRY) python model cluster images
	@$(if $(DRY),,PYTHONPATH=hack $(BIN)/python e2e/demo.py $(TOOK))

bench: setup ## measurements on this machine, into docs/results/
	PYTHONPATH=engine-image $(BIN)/python -m engine_benchmarks $(MODEL) --output docs/results $(addprefix --only ,$(ONLY))

aot: venv ## every GPU kernel compiled ahead of time for sm_80 to sm_100, figures into docs/results/
	PYTHONPATH=kernels $(BIN)/python -m kernel_benchmarks.aot --cache $(TRIMTAB_CACHE)/aot --results docs/results $(addprefix --only ,$(ONLY))

# guidellm and aiperf pin packages that exclude ours: each lives in a virtual environment of its own.
GUIDELLM ?= guidellm
AIPERF ?= aiperf
clients: setup ## guidellm and aiperf, unmodified, on our server (skips what is not installed; GUIDELLM=, AIPERF=)
	PYTHONPATH=engine-image $(BIN)/python -m engine_benchmarks.clients_bench $(MODEL) --guidellm $(GUIDELLM) --aiperf $(AIPERF)

# On a GPU machine's own Python: torch with CUDA, triton, transformers, numpy; nothing is installed. What else the engine
# imports comes from build/wheels, which `make bench-gpu-wheels` fills for that Python where there is a package index.
BENCH_PYTHON ?= $(PYTHON)
BENCH_PYTHON_VERSION ?= 3.12
BENCH_WHEELS := msgspec pyzmq llguidance nvidia-ml-py jinja2 markupsafe cuda-bindings cuda-pathfinder
# A peer that compiles its kernels there; the last small release (newer ones have 60 MB and more).
BENCH_PEER_WHEELS := flashinfer-python==0.5.3 apache-tvm-ffi==0.1.15.post2
bench-gpu-wheels: ## wheels that bench-gpu needs beside torch on a machine without a package index (BENCH_PYTHON_VERSION=3.12)
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(BENCH_PYTHON_VERSION) \
	    $(addprefix --platform manylinux,2014_x86_64 _2_28_x86_64 _2_31_x86_64) --dest build/wheels --constraint constraints.txt $(BENCH_WHEELS) $(BENCH_PEER_WHEELS)

# Triton compiles instead of interpreting. Options take the place of pyproject.toml's, which name plug-ins that machine
# may lack; with pytest-xdist there, kernels are compiled by several processes, and one that loses the device is replaced.
# Either half is interrupted after GPU_SECONDS and then tells what it has found. 5: no test is called so.
GPU_JOBS ?= 12
GPU_SECONDS ?= 270
GPU_PYTEST := PYTHONPATH=kernels:engine-image TRITON_INTERPRET=0 timeout --signal=INT --kill-after=15 $(GPU_SECONDS) $(BENCH_PYTHON) -m kernel_benchmarks.wheels build/wheels pytest -q \
    -o addopts=--import-mode=importlib -W default -p no:cacheprovider -m "not cpu" --durations=5 $(addprefix -k ,$(ONLY))
test-gpu: ## engine and kernels against their references on this machine's GPU (10 min at most; ONLY=paged_decode)
	@PYTHONPATH=kernels $(BENCH_PYTHON) -m kernel_benchmarks.machine test-gpu
	@workers=$$($(BENCH_PYTHON) -c 'import xdist' 2>/dev/null && printf -- '-n '); \
	$(GPU_PYTEST) $${workers:+$$workers 1} tests/engine/cuda; engine=$$?; \
	$(GPU_PYTEST) $${workers:+$$workers $(GPU_JOBS)} tests/kernels \
	    $(addprefix --ignore=tests/kernels/,native kernel_benchmarks); kernels=$$?; \
	for code in $$engine $$kernels; do case $$code in 0|5) ;; *) exit $$code;; esac; done

# Where measurements are written, from the first second on; what a borrowed machine gives back may be another folder.
OUTPUT ?= docs/results
bench-gpu: ## kernels and engine measured on this machine's GPU, peers beside them (10 min at most; ONLY=paged RESUME=1)
	@PYTHONPATH=kernels $(BENCH_PYTHON) -m kernel_benchmarks.machine bench-gpu
	@PYTHONPATH=kernels:engine-image $(BENCH_PYTHON) -m kernel_benchmarks --output $(OUTPUT) $(addprefix --only ,$(ONLY)) $(if $(RESUME),--resume)

# Seconds for each model.
TUNE_SECONDS ?= 200
TUNE_MODELS ?= llama-3.1-8b deepseek-v3
tune-gpu: ## launch configurations of fp8 products for this machine's GPU, into kernels/trimtab_kernels/configs (7 min at most)
	@PYTHONPATH=kernels $(BENCH_PYTHON) -m kernel_benchmarks.machine tune-gpu
	@for model in $(TUNE_MODELS); do PYTHONPATH=kernels $(BENCH_PYTHON) -m trimtab_kernels.tune kernels/kernel_benchmarks/shapes/$$model.json \
	    --batch-size 1 32 256 1024 4096 --budget-seconds $(TUNE_SECONDS) || [ $$? = 3 ] || exit 1; done

# Lives of each kind of scheduler: KV groups of two kinds (windows and all, chunks and all), images, short steps.
LIVES ?= 20000
lives: ## the scheduler's property tests over many more random lives (about an hour)
	$(BIN)/pytest tests/engine/scheduling/test_scheduler_properties.py -k Lives --lives $(LIVES)

soak: ## longer runs of the same stories, and more of the random worlds
	@$(DEV_TOOL) set-up $(NODES) python model cluster images prometheus
	$(BIN)/pytest tests/operator/reconcile/test_any_world.py tests/operator/reconcile/test_lagging_cache.py --worlds 10000 --timeout 1800
	$(BIN)/pytest tests --all -m soak
	$(BIN)/pytest e2e --soak

clean: ## remove what make made inside the checkout
	rm -rf $(VENV) $(NATIVE)/compiled .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build
