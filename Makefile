# Environments, each made once and remade only when what it is made of changes:
#   .venv      what a user installs for the demo        .venv-dev  the test suite and the linters
#   .venv-docs what builds the documentation's site
#
#   make demo                                     the whole stage on small real models
#   make test PYTEST_ARGS="tests/core -k digest"  the suite, or part of it
#   make test-lowest                              a part of it with the lowest versions that pyproject.toml allows
#   make lint                                     ruff, mypy, import contracts
#   make docs                                     the documentation as a site with a search: build/site/index.html
#
# Another interpreter: `make test PYTHON=/path/to/python3.12`. Another torch build, for instance one with CUDA: `TORCH=...`.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: demo test test-lowest docs lint lint-ruff lint-format lint-types lint-layers clean

# The first of these that really runs and is new enough (a pyenv shim may be on the path and still refuse to run).
CANDIDATES := python3 python3.13 python3.12 python3.11
NEW_ENOUGH := -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1
ifndef PYTHON
PYTHON := $(firstword $(foreach candidate,$(CANDIDATES),$(shell $(candidate) $(NEW_ENOUGH) && echo $(candidate))))
endif

# Pinned and installed first: left to a dependency's range, pip may pick a newer build with gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0
CONSTRAINTS := requirements/dev-constraints.txt
PIP := -m pip install --disable-pip-version-check --no-input -qq -c $(CONSTRAINTS)
# More than two cores have: servers that start and processes that die are waited for.
PYTEST_WORKERS ?= 3
PYTEST_ARGS ?=

demo: .venv/.installed
	.venv/bin/compile-stage demo

# Compiled once: workers may not write into the package, and each of the hundreds that a run of the suite starts would
# compile what it imports. The tests are kept compiled too, where PYTHONDONTWRITEBYTECODE is set as well, as in many
# container images: pytest rewrites 8,400 assertions, 11 CPU seconds in each of its processes.
test: .venv-dev/.installed
	@.venv-dev/bin/python -m compileall -q compile_stage
	PYTHONDONTWRITEBYTECODE= .venv-dev/bin/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

# What speaks to MLflow and to the compilers. What older versions warn of is no error, as it is with the newest.
LOWEST_EXTRAS := openvino,signing,torch,sklearn,lightgbm,catboost,statsmodels,parquet,metrics
LOWEST_TESTS := mlflow xgboost-cpu 'pytest>=9' pytest-timeout pytest-xdist hypothesis cyclonedx-python-lib polygraphy 'moto[server]>=5.0'
LOWEST_ARGS ?= tests/registry tests/precision tests/backends tests/serving
# ONNX's own reference multiplies no bfloat16 in 1.21 and older, and 1.17 has not all test cases. Of an average over a
# window that ends behind the image, ONNX Runtime 1.25 and OpenVINO 2026.0 answer differently.
LOWEST_ARGS += --deselect tests/precision/test_halves.py::test_normalisation_and_softmax_stay_in_float32_in_bf16 \
	--deselect 'tests/precision/test_halves.py::test_a_subgraph_is_left_alone_and_noted[bf16]' \
	--deselect 'tests/precision/test_structure.py::test_a_lowered_graph_is_the_same_model[bf16]' \
	--deselect tests/backends/test_openvino.py::test_a_mask_of_truth_values_does_not_make_a_layer_integer \
	--deselect tests/backends/test_openvino.py::test_types_that_numpy_lacks_are_refused \
	--deselect tests/backends/test_openvino.py::test_pools_that_round_their_size_up_have_no_window_behind_the_end
test-lowest: .venv-lowest/.installed
	.venv-lowest/bin/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal -W default $(LOWEST_ARGS)

.venv-lowest/.installed: pyproject.toml requirements/lowest.txt
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check --no-input -qq $(TORCH)
	@$(@D)/bin/python -m pip install --disable-pip-version-check --no-input -qq -c requirements/lowest.txt -e '.[$(LOWEST_EXTRAS)]' $(LOWEST_TESTS)
	@touch $@

# `make -k lint` runs all four, whatever one of them finds.
lint: lint-ruff lint-format lint-types lint-layers

lint-ruff: .venv-dev/.installed
	.venv-dev/bin/ruff check .

lint-format: .venv-dev/.installed
	.venv-dev/bin/ruff format --check .

# What runs on devices, some of which are Windows.
ON_DEVICES := $(addprefix compile_stage/,$(addprefix devices/,agent.py bootstrap.py calls.py meter.py worker.py) engine/open_model.py engine/usage.py)
lint-types: .venv-dev/.installed
	.venv-dev/bin/mypy
	.venv-dev/bin/mypy --platform win32 $(ON_DEVICES)

lint-layers: .venv-dev/.installed
	.venv-dev/bin/lint-imports

# A broken link or anchor, and a page of the contents that is not there, fail it.
docs: .venv-docs/.installed
	$(PYTHON) docs/site/build.py
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --config-file docs/site/mkdocs.yml
	@echo "build/site/index.html; with the search: python3 -m http.server --directory build/site"

.venv-docs/.installed: requirements/docs.txt
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check --no-input -qq -r $<
	@touch $@

clean:
	rm -rf .venv .venv-dev .venv-lowest .venv-docs build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

.venv/.installed: EXTRA := demo
.venv-dev/.installed: EXTRA := dev
.venv/.installed .venv-dev/.installed: pyproject.toml $(CONSTRAINTS)
	@$(or $(PYTHON),false) $(NEW_ENOUGH) || { \
		echo "compile-stage needs Python 3.11 or newer, and $(or $(PYTHON),none of: $(CANDIDATES)) is not one that runs here."; \
		echo "Install one (Debian: apt-get install python3 python3-venv) or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; \
		exit 1; } >&2
	@echo "Making $(@D) with $$($(PYTHON) --version): a few minutes, this once"
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python $(PIP) $(TORCH)
	@$(@D)/bin/python $(PIP) -e '.[$(EXTRA)]'
	@touch $@
