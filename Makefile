# `make bench` measures, `make test` tests; both install what they need into .venv first.
PYTHON ?= python3
ARGS ?=

.PHONY: bench test check unit selftest format figures history-figures clean

bench: .venv/installed  ## run the CPU cases and compare with the last accepted figures
	.venv/bin/pytest bench_cases -m cpu $(ARGS)

test: check unit  ## lint, types and the whole test suite

check: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

unit: .venv/installed
	.venv/bin/pytest tests $(ARGS)

selftest: .venv/installed  ## inject every fault into real training, and see each caught (some minutes)
	.venv/bin/perfsuite selftest

figures: .venv/installed  ## what perfsuite itself costs
	.venv/bin/python -m tests.benchmarks.collection
	.venv/bin/python -m tests.benchmarks.overhead

history-figures: .venv/installed  ## what a long history costs, and how soon a drift is found (half an hour)
	.venv/bin/python -m tests.benchmarks.history
	.venv/bin/python -m tests.benchmarks.drift

format: .venv/installed
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .perfsuite .benchmarks .pytest_cache .mypy_cache .ruff_cache
