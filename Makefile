# Two commands: `make serve` runs the server, `make test` runs every check and test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?= demo
ARGS ?=
JOBS ?= 2

.PHONY: install serve chat native test check unit bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard src/gpu/fast/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "regrow needs Python 3.11 or newer; set PYTHON=...")'
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@mkdir -p $(VENV)/typing && ln -sfn ../../src $(VENV)/typing/regrow
	@touch $@
	@echo "Installed."

serve: install
	@$(BIN)/regrow serve $(MODEL) $(ARGS)

chat: install
	@$(BIN)/regrow chat $(ARGS)

native:
	@$(BIN)/python setup.py --quiet build_ext --inplace

check: install
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile --cov --cov-report= $(ARGS)
	$(BIN)/coverage report --include='src/policy/*,src/actors/*' --fail-under=95

test: check unit

bench: install
	$(BIN)/regrow bench --quick

clean:
	rm -rf $(VENV) build dist *.egg-info
