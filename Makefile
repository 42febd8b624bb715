# `make test` before a commit; CI runs `make test-all`. Both need Python 3.11 or later and a package index, and build the
# environments they run in from the pins in requirements/.

PYTHON ?= python3
WORKERS ?= 2
KILLS ?= 20
# A file of tests runs in one worker, so that what its tests share is made once; those that take long come first.
# Not loadgroup: with pytest 9.2, pytest-xdist 3.8 ignores its groups without a word.
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
OLDEST_TORCH := 2.6.0
# Left out of `make test-newest`: they need an installed vLLM, which asks for one torch.
NEED_VLLM := tests/engines/test_vllm_*.py tests/cli/test_train_command.py tests/cluster/test_capacity.py tests/faults/test_bad_input.py
TRANSFORMERS4_TESTS ?= tests/replay/adapters tests/replay/test_silent_faults.py tests/replay/test_compile.py::test_a_compiled_model_recomputes_with_its_own_routes tests/routes/test_topology.py tests/engines/test_transformers.py tests/engines/test_session.py tests/faults/test_model_folders.py tests/megatron/weights/test_families.py

EXTRAS ?= ray train lora tensorboard wandb mlflow trackio trl megatron transformers serve report cli vllm
# Versions for `make test-extras`, as far as an extra needs these packages at all.
PINS ?= requirements/test.txt
VERL_VERSIONS ?= 0.8.0 0.9.0 0.9.1
MS_SWIFT_VERSIONS ?= 4.5.0 4.5.1 4.5.2 4.5.3 4.6.0
# ms-swift up to 4.5.2 packs with a field that Megatron-Core 0.16 does not have, though it asks for that.
MEGATRON_FOR_SWIFT := 0.17.1
MEGATRON_IN_CI := 0.12.1 0.19.2
MEGATRON_VERSIONS ?= 0.12.1 0.13.1 0.14.0 0.15.3 0.17.1 0.18.2 0.19.2

# Tests of what is not installed are skipped, so nothing may be missing where everything is to be tested.
NEEDED := accelerate datasets hatchling math_verify matplotlib megatron peft pydantic ray rich starlette tenacity tensorboard tokenizers transformers trl tyro uvicorn vllm wandb
NOTHING_MISSING = .venv/bin/python -c 'from importlib.util import find_spec as f; missing = [m for m in "$(NEEDED)".split() if not f(m)]; assert not missing, missing'

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# The tests start hundreds of Python processes: without bytecode each of them would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
.NOTPARALLEL:
.PHONY: help train test-extras docs site test test-all test-quick test-long test-faults lint types unit unit-all test-transformers4 test-transformers-between test-sglang test-plugins test-plugins-in-ci test-gpu test-megatron-versions test-megatron-in-ci test-oldest test-newest mutants format bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-26s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: .venv/.ready ## GRPO with routing replay on a tiny MoE, rollouts by vLLM on the CPU: about 8 minutes on two idle cores, installation included
	@VLLM_LOGGING_LEVEL=ERROR VLLM_CPU_OMP_THREADS_BIND=nobind TRANSFORMERS_VERBOSITY=error TQDM_DISABLE=1 \
	  TORCH_LOGS=-torch._library.triton TORCH_CPP_LOG_LEVEL=ERROR PYTHONWARNINGS=ignore:resource_tracker:UserWarning \
	  .venv/bin/moe-replay train $(ARGS)

docs: .venv/.ready ## Write docs/config.md and the schema of recipes from the code
	.venv/bin/python -m moe_replay.train.config.reference > docs/config.md

test: lint types site test-transformers4 test-transformers-between unit ## What a change must pass: lint, types, the site, tests on transformers 4.57 and 5.x, real runs of the main parts. Under 12 minutes on two idle cores

test-all: lint types site test-extras test-transformers4 test-transformers-between test-megatron-in-ci test-plugins-in-ci unit-all ## Everything that CI runs: `make test`, further whole runs (mark `whole_runs`), each extra alone, and the core of the integrations

site: .venv/.ready .mkdocs/.ready ## Build the documentation as a site in build/site; a warning is an error
	@echo "==> site"
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=.mkdocs .venv/bin/python -m mkdocs build --quiet --strict

.mkdocs/.ready: requirements/docs.txt .venv/.pinned
	@rm -rf .mkdocs
	@.venv/bin/python -m pip --disable-pip-version-check -qq install --no-deps --no-compile --target .mkdocs -r $<
	@touch $@

lint: .venv/.ready ## ruff: rules and formatting
	@echo "==> lint"
	.venv/bin/ruff check --quiet --output-format concise .
	.venv/bin/ruff format --quiet --check .

types: .venv/.ready ## pyrefly
	@echo "==> types"
	.venv/bin/pyrefly check --python-interpreter-path .venv/bin/python --progress-bar no

unit: .venv/.ready ## Tests on transformers 5.x, without further whole runs
	@echo "==> tests"
	@$(NOTHING_MISSING)
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(PARALLEL) -m "not whole_runs"

unit-all: .venv/.ready ## Tests on transformers 5.x, with further whole runs
	@echo "==> all tests"
	@$(NOTHING_MISSING)
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(PARALLEL)

test-quick: .venv/.ready ## Tests that start no engine, no ranks and no training: an answer in under three minutes
	@echo "==> quick tests"
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(PARALLEL) -m "not slow and not distributed and not engine"

test-long: .venv/.ready ## The combinations that `make test-all` leaves out, since others cover their parts. Minutes, before releases
	@echo "==> further combinations"
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(PARALLEL) -m thorough

test-faults: .venv/.ready ## Faults, counted: kills at random moments with the real vLLM, KILLS times each, and flipped bits. Minutes, and not part of `make test-all`
	@echo "==> faults"
	MOE_REPLAY_KILLS=$(KILLS) OMP_NUM_THREADS=1 .venv/bin/python -m pytest tests/faults -m "faults_long or not faults_long"

test-transformers4: .venv-tf4/.ready ## Tests of what depends on transformers, on 4.57
	@echo "==> tests on transformers 4.57"
	OMP_NUM_THREADS=1 .venv-tf4/bin/python -m pytest -n $(WORKERS) $(TRANSFORMERS4_TESTS)

test-transformers-between: .venv/.ready .transformers/.ready ## Replay on a release of transformers between 5.0 and 5.18
	@echo "==> tests on transformers $$(sed -n 's/^transformers==//p' requirements/transformers-between.txt)"
	PYTHONPATH=.transformers OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n $(WORKERS) \
	  tests/replay/adapters/test_transformers_versions.py

.transformers/.ready: requirements/transformers-between.txt .venv/.pinned
	@rm -rf .transformers
	@.venv/bin/python -m pip --disable-pip-version-check -qq install --no-deps --target .transformers -r $<
	@touch $@

test-sglang: .venv-sglang/.ready ## Sampling and training with the real SGLang on CPU; not part of `make test-all`
	@echo "==> tests on SGLang"
	OMP_NUM_THREADS=1 .venv-sglang/bin/python -m pytest $(PARALLEL) tests/real_sglang

test-plugins: .venv/.ready .venv-plugins/.pinned .plugins/megatron-$(MEGATRON_FOR_SWIFT)/.ready .plugins/main-ppo/.ready ## The integrations in every known release of other trainers; not part of `make test-all`
	@for version in $(VERL_VERSIONS); do \
	  $(call TEST_PLUGIN,verl,$$version,) tests/plugins/test_verl_*.py tests/plugins/test_known_bugs.py; \
	done
	@for version in $(MS_SWIFT_VERSIONS); do \
	  megatron=; case $$version in 4.5.[012]) megatron=$(CURDIR)/.plugins/megatron-$(MEGATRON_FOR_SWIFT):;; esac; \
	  $(call TEST_PLUGIN,ms-swift,$$version,$$megatron) tests/plugins/test_ms_swift*.py tests/plugins/test_known_bugs.py; \
	done
	@echo "==> verl $(lastword $(VERL_VERSIONS)), its own trainer with Ray and vLLM"
	@PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.plugins/verl-$(lastword $(VERL_VERSIONS)):$(CURDIR)/.plugins/main-ppo \
	  .venv/bin/python -m pytest -q tests/plugins/test_verl_main_ppo.py

# In one process each: a healthy run, each planted fault, swapped samples.
PLUGINS_IN_CI := -m "not distributed" -k "reported or reports or stops_the_run_by_name or swapped"

test-plugins-in-ci: .venv-plugins/.pinned ## The core of the integrations, in the newest verl and ms-swift, on one rank
	@$(call TEST_PLUGIN,verl,$(lastword $(VERL_VERSIONS)),) $(PLUGINS_IN_CI) -n $(WORKERS) --dist loadfile \
	  tests/plugins/test_verl_fsdp.py tests/plugins/test_verl_megatron.py
	@$(call TEST_PLUGIN,ms-swift,$(lastword $(MS_SWIFT_VERSIONS)),) $(PLUGINS_IN_CI) tests/plugins/test_ms_swift.py

# Tests with a release of a trainer, which is put beside their environment: $(call TEST_PLUGIN,verl,0.9.1,PATH:) ARGUMENTS
TEST_PLUGIN = echo "==> $(1) $(2)"; \
	  $(MAKE) --no-print-directory .plugins/$(1)-$(2)/.ready; \
	  PYTHONPATH=$(CURDIR)/src:$(3)$(CURDIR)/.plugins/$(1)-$(2) OMP_NUM_THREADS=1 .venv-plugins/bin/python -m pytest -q

.plugins/verl-%/.ready: .venv-plugins/.pinned
	@$(call UV_BESIDE,verl==$*) || { $(call PUT_BESIDE,verl==$*); }
	@rm -rf $(@D)/tests && touch $@

.plugins/ms-swift-%/.ready: .venv-plugins/.pinned
	@$(call UV_BESIDE,ms-swift==$*) || { $(call PUT_BESIDE,ms-swift==$*); }
	@touch $@

.plugins/megatron-%/.ready: .venv-plugins/.pinned
	@$(call PUT_BESIDE,--ignore-requires-python megatron-core==$*)  # which uv cannot
	@touch $@

.plugins/main-ppo/.ready: requirements/verl-main-ppo.txt .venv-plugins/.pinned
	@rm -rf $(@D)
	@$(call UV_BESIDE,-r $<) || { $(call PUT_BESIDE,-r $<); }
	@rm -rf $(@D)/tests && touch $@

PUT_BESIDE = rm -rf $(@D) && .venv-plugins/bin/python -m pip --disable-pip-version-check -qq install --no-deps --target $(@D) $(1)
UV_BESIDE = .venv-plugins/bin/python requirements/uv.py .uv/bin/uv -qq --no-python-downloads pip install --python .venv-plugins/bin/python \
  --no-deps --target $(@D) $(1)

test-megatron-versions: .venv/.ready ## Routers on every Megatron-Core from 0.12 on; not part of `make test-all`
	@test -d .megatron/triton || .venv/bin/python -m pip -qq install --no-deps --target .megatron/triton triton
	@for version in $(MEGATRON_VERSIONS); do \
	  echo "==> megatron-core $$version"; \
	  test -d .megatron/$$version || .venv/bin/python -m pip -qq install --no-deps --ignore-requires-python \
	    --target .megatron/$$version megatron-core==$$version; \
	  PYTHONPATH=.megatron/$$version:.megatron/triton OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q \
	    tests/replay/adapters/test_megatron_versions.py -m "thorough or not thorough"; \
	done

test-megatron-in-ci: ## Routers on the oldest and the newest Megatron-Core
	@$(MAKE) --no-print-directory test-megatron-versions MEGATRON_VERSIONS="$(MEGATRON_IN_CI)"

test-oldest: ## The library on the oldest torch and Transformers; downloads a torch with CUDA on x86_64; not part of `make test-all`
	@$(PYTHON) -m venv --clear .venv-oldest && $(call GET_UV,.venv-oldest)
	@grep -v '^-r\|^sympy' requirements/transformers4.txt > .venv-oldest/pins.txt
	@.venv-oldest/bin/python requirements/uv.py .uv/bin/uv --no-python-downloads pip install --python .venv-oldest/bin/python \
	  torch==$(OLDEST_TORCH) -r .venv-oldest/pins.txt
	PYTHONPATH=src OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -q -n $(WORKERS) $(TRANSFORMERS4_TESTS)

test-newest: ## The quick tests on the newest release of everything on the package index; not part of `make test-all`
	@$(PYTHON) -m venv --clear .venv-newest && $(call GET_UV,.venv-newest)
	@.venv-newest/bin/python requirements/uv.py .uv/bin/uv --no-python-downloads pip install --python .venv-newest/bin/python \
	  '.[lora,trl,ray,megatron,tensorboard,trackio,dev]'
	@.venv-newest/bin/python -c 'from importlib.metadata import version as v; from moe_replay.utils.tested_versions import NAMES; \
	  print("==> newest:", *(f"{name} {v(name)}" for name in NAMES if name not in ("vllm", "sglang")))'
	PYTHONPATH=src OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -q $(PARALLEL) \
	  -m "not slow and not distributed and not engine" $(addprefix --ignore-glob=,$(NEED_VLLM))

test-extras: .venv/.ready ## Each extra of the wheel alone, installed into a new environment, does one real step (PINS= for the newest versions)
	@echo "==> extras, each alone"
	@$(call GET_UV,.venv)
	@OMP_NUM_THREADS=1 .venv/bin/python tests/wheel/matrix.py --uv .uv/bin/uv --folder build/extras \
	  --jobs $(if $(filter 0,$(WORKERS)),1,$(WORKERS)) --constraints requirements/torch.txt $(PINS) \
	  $(if $(PINS),--own-constraints requirements) --extras $(EXTRAS)

test-gpu: ## vLLM, replay and routes on a GPU, with the `$(PYTHON)` of an environment that has vLLM and pytest; not part of `make test-all`
	@echo "==> tests on a GPU"
	@$(PYTHON) -c 'import torch; assert torch.cuda.is_available(), "no GPU here"'
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu tests/test_cuda.py

mutants: .venv/.ready ## Break the code in listed ways and see that the tests notice; before releases
	.venv/bin/python -m tests.mutants.run --jobs $(if $(filter 0,$(WORKERS)),1,$(WORKERS)) --only "$(ONLY)"

format: .venv/.ready ## Rewrite the code the way `make lint` wants it
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: .venv/.ready ## Run every script in benchmarks/
	@for script in benchmarks/*.py; do echo "==> $$script"; .venv/bin/python "$$script"; done

clean: ## Remove environments, caches and build products
	rm -rf .venv .venv-newest .venv-oldest .venv-tf4 .venv-sglang .venv-plugins .megatron .plugins .mkdocs .transformers .uv build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -exec rm -rf {} +

# ---- environments ----------------------------------------------------------------------------------------------------
# `.pinned` is written when an environment holds exactly its pins, so a changed pin file or an interrupted install means
# a new environment. `.ready` adds the package itself, editable, and is redone when pyproject.toml changes.

# On a terminal pip and uv show what they download; in a log they are silent.
SILENT := $(shell test -t 2 || echo -qq)
PIP = $(@D)/bin/python -m pip --disable-pip-version-check $(SILENT)
# uv installs in a fraction of pip's time; its cache is the user's, so that the next clone has all packages already.
GET_UV = test .uv/.ready -nt requirements/uv.txt || { rm -rf .uv && $(1)/bin/python -m pip --disable-pip-version-check \
  -qq install --no-deps --no-compile --target .uv -r requirements/uv.txt && touch .uv/.ready; }
UV = $(@D)/bin/python requirements/uv.py .uv/bin/uv $(SILENT:-qq=-q) --no-python-downloads pip install --python $(@D)/bin/python

.venv/.pinned: requirements/test.txt requirements/torch.txt
.venv/.pinned: PINS_FLAGS := --no-deps
.venv-tf4/.pinned: requirements/transformers4.txt requirements/torch.txt
.venv-sglang/.pinned: requirements/sglang-cpu.txt requirements/torch.txt
.venv-sglang/.pinned: PINS_FLAGS := --no-deps
.venv-plugins/.pinned: requirements/plugins.txt requirements/torch.txt
.venv-plugins/.pinned: PINS_FLAGS := --no-deps

$(addsuffix /.pinned,.venv .venv-tf4 .venv-sglang .venv-plugins):
	@echo "==> $(@D): new environment ($$($(PYTHON) --version)): downloads up to 1 GB, once"
	@$(PYTHON) -m venv --clear $(@D)
	@$(call GET_UV,$(@D)) || echo "==> $(@D): no uv, so pip installs, which takes minutes more"
	@echo "==> $(@D): $$(grep -v '^#' requirements/torch.txt)"
	@$(UV) -r requirements/torch.txt || $(PIP) install -r requirements/torch.txt
	@echo "==> $(@D): $<"
	@$(UV) $(PINS_FLAGS) -c requirements/torch.txt -r $< || $(PIP) install $(PINS_FLAGS) -c requirements/torch.txt -r $<
	@touch $@

$(addsuffix /.ready,.venv .venv-tf4 .venv-sglang): %/.ready: %/.pinned pyproject.toml
	@echo "==> $(@D): moe-replay, editable"
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@
