PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One torch/BLAS thread per process: on a busy machine with two cores, two threads are slower than one.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

TRAIN_RUN ?= runs/train
TRAIN_FLAGS ?= --total-timesteps 1000000 --eval-interval 2 --eval-episodes 16
CURVE_FLAGS ?=
DEMO_FLAGS ?= -o demo.html

.PHONY: train test test-all demo lint docs install clean

train: $(VENV)/.trainable  ## train two agents that keep the right experts on a GPU; table and picture on test sequences
	$(BIN)/python cleanrl_ppo/ppo_moe_marl.py --run-dir $(TRAIN_RUN) $(TRAIN_FLAGS)
	$(BIN)/clustergym offload curve $(TRAIN_RUN) $(CURVE_FLAGS)

test: install  ## linters, types, and the tests of all behaviour on small cases
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow"

test-all: test  ## the same, and what takes long: servers, wheels, documentation, learning, the CUDA simulator
	$(BIN)/pytest -n 2 --dist loadfile -m slow

demo: $(VENV)/.trainable  ## write demo.html: a trace, all planners, time per layer, the placement before and after
	$(BIN)/clustergym demo $(DEMO_FLAGS)

lint: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: install  ## build the documentation into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

install: $(VENV)/.installed

# Training needs only half of the packages that the tests need, so `make train` starts sooner.
$(VENV)/.trainable: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -e $(VENV)/.installed || $(BIN)/python -m pip install --quiet -c constraints.txt -e ".[train]"
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs dist site demo.html .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
