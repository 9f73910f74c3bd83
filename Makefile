# `make bench` measures, `make test` tests; both install what they need into .venv first.
# The jobs in .github/workflows run these targets, so the jobs can be run and tested anywhere.
PYTHON ?= python3
ARGS ?=
HARDWARE ?= cpu
OUT ?= out
PAIR ?=
SAMPLE ?= 0
SEED ?= 0
DRY_CI = (accelerate-ddp or accelerate-fsdp1 or ddp-gpt2 or fsdp-shard_grad_op) and gpt2-large \
	or lightning-fsdp-none-gpt2-xl-s128-b1-fp16-mixed-eager \
	or llama-3.1-8b and (trainer and ac_full or nanotron-dp4-tp4 and b4-bf16 and 4x4 or fsdp2-no_reshard) \
	or llama-3.2-1b and ddp and 1x8 and (lora and not 4bit and not 8bit or selective-op) \
	or llama-3-8b and every-2 and (fsdp2 or torchtitan)
# Compile perfsuite once, for the thousands of processes that import it.
TESTS = .venv/bin/python -m compileall -q perfsuite && .venv/bin/pytest tests --numprocesses=3 --dist=worksteal
AS_USERS_DO = --start-smoke-tests-as-users-do
export BASE HARDWARE OUT TAG

.PHONY: bench damaged dry dry-ci comparisons quick unit smoke test test-all versions test-lowest test-newest check docs dist mutants selftest gpu-day \
	format figures hindsight releases history-figures samples pictures browser slurm podman clean night site compare compare-dry

# On a laptop, times are too noisy to judge, so each case is launched at most twice. Two launches cannot show a slowdown,
# so only counts can fail a case. If others use the machine, each case is launched once and only its counts are judged.
bench: .venv/installed  ## measure a tiny model with every framework, compare with the last run (five minutes)
	.venv/bin/pytest bench_cases/test_cpu.py --perf-record-launches=2 --perf-max-launches=2 --perf-allow-shared \
		--perf-budget=5min $(ARGS)

comparisons: .venv/installed  ## launch the tiny twins of the published comparisons once each, and print the tables
	rm -rf .perfsuite/comparisons
	.venv/bin/pytest bench_cases -m cpu --ignore bench_cases/test_cpu.py --perf-record-launches=1 \
		--perf-store=.perfsuite/comparisons $(ARGS); status=$$?; \
	.venv/bin/python -m bench_cases.published --store .perfsuite/comparisons && exit $$status

quick: .venv/installed  ## unit tests of the folders that differ from BASE (main), and of the folders that import them
	tests=$$(.venv/bin/python -m tests.changed $(BASE)) && { [ -z "$$tests" ] || \
		.venv/bin/pytest $$tests -m unit --numprocesses=3 $(ARGS) || [ $$? -eq 5 ]; }

unit: .venv/installed  ## all unit tests, which start no process (five minutes on two cores)
	$(TESTS) -m unit $(ARGS)

smoke: .venv/installed  ## one launch of each framework, and the main paths
	$(TESTS) -m smoke $(AS_USERS_DO) $(ARGS)

test: .venv/installed  ## lint, types, documentation, and every test except those marked nightly
	$(MAKE) --jobs=2 --output-sync check docs
	$(TESTS) -m "not nightly" $(ARGS)

test-all: .venv/installed  ## what `make test` does, but with the nightly tests; CI on GitHub runs this
	$(MAKE) --jobs=2 --output-sync check docs
	$(TESTS) $(AS_USERS_DO) $(ARGS)

versions:  ## the tests with the lowest torch that pyproject.toml allows, and with the newest (8 GB, half an hour each)
	$(MAKE) test-lowest PYTHON=python3.11
	$(MAKE) test-newest PYTHON=python3.13

check: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo
	.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv/bin/zizmor --offline --persona pedantic .github

docs: .venv/installed  ## the documentation in build/docs, with an example report and history made by the current code; warnings are errors
	.venv/bin/sphinx-build --quiet --fail-on-warning --keep-going --doctree-dir build/doctrees docs build/docs
	[ ! -e tests/sample_reports.py ] || .venv/bin/python -m tests.sample_reports build/docs
	[ ! -e tests/features/history/live.py ] || .venv/bin/python -m tests.features.history.live build/docs

dist: .venv-dist/installed  ## TAG=v0.1.0: build and check sdist and wheel in dist/; without TAG, any version is allowed
	rm -rf dist
	.venv-dist/bin/python -m build
	.venv-dist/bin/twine check --strict dist/*
	.venv-dist/bin/check-wheel-contents dist/*.whl
	version=$$(basename dist/*.tar.gz .tar.gz); [ "$${TAG:-v$${version#perfsuite-}}" = "v$${version#perfsuite-}" ] || \
		{ echo "the tag is $$TAG, __version__ in perfsuite/__init__.py makes $$version: change one of them"; exit 1; }

test-lowest test-newest: test-%: .venv-%/installed
	.venv-$*/bin/pytest tests --numprocesses=3 -m "not simulation and not browser" $(AS_USERS_DO) $(ARGS)

mutants: .venv/installed  ## SAMPLE=90 SEED=1: change one token of the code at a time, and list the changes that no unit test notices
	nice -n 10 .venv/bin/python -m tests.mutants --sample $(SAMPLE) --seed $(SEED) $(ARGS)

dry: .venv/installed  ## dry runs of all cases that are not for a CPU (about two minutes of one core for each case)
	.venv/bin/pytest bench_cases --perf-dry -m "not cpu" --numprocesses=logical --maxprocesses=8 --benchmark-disable $(ARGS)

dry-ci:  ## dry runs of some cases that cover every framework, judged against the reviewed counts
	$(MAKE) dry ARGS='-k "$(DRY_CI)" --perf-missing-baseline=fail $(ARGS)'

selftest: .venv/installed  ## inject every fault into real training, and check that each is caught (a few minutes)
	.venv/bin/perfsuite selftest

gpu-day: .venv/installed  ## OUT=out: checks that need a GPU, in seven parts (parts 1 to 6: 44 minutes; docs/develop/gpu-day.md)
	status=0; for part in $(if $(wildcard $(or $(OUT),out)/dry.json),,dry) 1 2 3 4 5 6 7; do \
		tests/gpu/day.sh $$part "$$OUT" || { ended=$$?; [ $$status -eq 1 ] || status=$$ended; [ $$ended -ne 2 ] || break; }; \
	done; exit $$status

figures: .venv/installed  ## the costs of perfsuite itself
	.venv/bin/python -m tests.benchmarks.collection
	.venv/bin/python -m tests.benchmarks.overhead
	.venv/bin/python -m tests.benchmarks.report

damaged: .venv/installed  ## COUNT=2000 SEED=0: check that damaged files and commands cause no traceback, hang or false green (15 minutes)
	.venv/bin/python -m tests.benchmarks.damaged $(or $(COUNT),2000) 300 $(SEED)

hindsight: .venv/installed  ## PAIR=accelerate-3762: compare releases with a known regression, and unchanged releases (an hour)
	.venv/bin/python -m tests.benchmarks.hindsight $(PAIR) $(ARGS)

releases: release-accelerate release-transformers release-peft release-lightning release-torch release-trl  ## rewrite docs/releases (hours)

release-accelerate: WHAT = --from 1.10.0 -k "(accelerate or trainer) and not lora"
release-transformers: WHAT = --from 5.0.0 --minors -k "llama_train or trainer"
release-peft: WHAT = --from 0.18.0 -k "peft or lora"
release-lightning: WHAT = --from 2.5.0 -k "lightning or fabric"
release-torch: WHAT = --from 2.11.0 --minors -k releases
release-torch: CASES = torch_cases
release-trl: WHAT = --from 1.4.0 --minors -k trl
release-%: .venv/installed  # uses its own lock, because counting work does not need a quiet machine
	PERFSUITE_LOCK=$(CURDIR)/.perfsuite/releases.lock .venv/bin/perfsuite releases $* $(WHAT) \
		--cases tests/benchmarks/hindsight/$(or $(CASES),cases).py > docs/releases/$*.new || [ $$? -eq 3 ]
	.venv/bin/python -m tests.benchmarks.hindsight.release_page $* < docs/releases/$*.new > docs/releases/$*.md
	rm docs/releases/$*.new

samples: .venv/installed  ## rewrite the sample reports on the pages, and the pages of commands and options, with the current code
	.venv/bin/python -m tests.sample_reports

pictures: samples  ## redraw docs/images/ with the current code; pictures of pages need a browser (a minute; 5 if the engine has changed)
	.venv/bin/python -m tests.pictures

browser:  ## install Chromium and the scripts of asv's pages, for the tests and pictures that need them (as root)
	command -v chromedriver || { apt-get update -qq && \
	  apt-get install -qq -y --no-install-recommends chromium chromium-driver fonts-dejavu-core; }
	npm install --silent --no-audit --no-fund --no-package-lock --prefix tests/features/history/asv

slurm:  ## install Slurm for the tests that need it (as root)
	command -v slurmctld && command -v slurmd && command -v srun && command -v munged && command -v ip || { \
	  apt-get update -qq && \
	  apt-get install -qq -y --no-install-recommends slurmctld slurmd slurm-client munge iproute2; }

podman:  ## install podman for the test of an image as an arm (as root)
	command -v podman || { apt-get update -qq && apt-get install -qq -y --no-install-recommends podman runc; }

history-figures: .venv/installed  ## the costs of a long history, and how soon a drift is found (half an hour)
	.venv/bin/python -m tests.features.history.figures
	.venv/bin/python -m tests.features.history.drift

format: .venv/installed
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

night: .venv/installed  ## HARDWARE=h100 OUT=out: run the doctor, the self-test and every case for that hardware, and write a report
	.venv/bin/perfsuite night --hardware "$$HARDWARE" --out "$$OUT" -- $(ARGS)

site: docs  ## the documentation in build/site, and asv's pages of the branch perfsuite-history in build/site/history
	rm -rf build/site build/pages
	cp -r build/docs build/site
	if git rev-parse --quiet --verify origin/perfsuite-history; then \
		.venv/bin/perfsuite history pull && .venv/bin/perfsuite history publish --out build/pages --history history \
		--commit-url "$${GITHUB_SERVER_URL:-https://github.com}/$${GITHUB_REPOSITORY:-}/commit/" && \
		cp -r build/pages/html build/site/history; \
	fi

compare: .venv/installed  ## BASE=main HARDWARE=h100: launch BASE and the current commit alternately, and compare them
	.venv/bin/perfsuite doctor --quick --expect "$$HARDWARE" || [ $$? -eq 3 ]
	rm -rf .perfsuite/base
	git worktree prune
	git worktree add --force --detach .perfsuite/base "$$BASE"
	$(MAKE) -f "$(CURDIR)/Makefile" -C .perfsuite/base .venv/installed
	.venv/bin/pytest bench_cases -m "$$HARDWARE" --perf-against="$$BASE .perfsuite/base/.venv/bin/python" \
		--perf-report "$$OUT" $(ARGS)

compare-dry: .venv/installed  ## BASE=main: compare the work of a step at BASE and at the current commit, with dry runs (no GPU)
	.venv/bin/perfsuite compare --dry --against "$$BASE" -k '$(DRY_CI)' --out "$$OUT" $(ARGS)

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --upgrade pip  # the pip of Python 3.11 takes three times as long
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --no-deps --upgrade --target .venv/deepspeed \
		deepspeed hjson msgpack  # in a separate directory, only for the tests of DeepSpeed: accelerate and the Trainer import deepspeed if it is installed
	for package in megatron-core megatron-fsdp nemo-automodel; do \
		.venv/bin/python -m pip install --quiet --constraint constraints.txt --no-deps --upgrade \
			--target .venv/megatron/$$package $$package || exit; \
	done  # each package in its own directory: these packages import each other if possible, but these versions are incompatible
	touch $@

.venv-lowest/installed: TORCH = torch==$(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml).*
.venv-newest/installed: TORCH = torch
.venv-%/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	grep -Ev '^(torch|setuptools)==' constraints.txt > .venv-$*/constraints.txt  # torch 2.11 needs setuptools < 82
	.venv-$*/bin/python -m pip install --quiet --constraint .venv-$*/constraints.txt \
		--editable ".[dev]" "$(TORCH)"
	touch $@

.venv-dist/installed: constraints.txt
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --constraint constraints.txt build check-wheel-contents twine
	touch $@

clean:  ## remove everything that can be rebuilt, but not .perfsuite, which holds measurements
	rm -rf .venv .venv-lowest .venv-newest .venv-dist .pytest_cache .mypy_cache .ruff_cache build dist
