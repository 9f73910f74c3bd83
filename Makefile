# `make bench` measures, `make test` tests; both install what they need into .venv first.
# What the jobs in .github/workflows run stands here, so that it can be run and tested anywhere.
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
# compileall: once for the thousands of processes that import it
TESTS = .venv/bin/python -m compileall -q perfsuite && .venv/bin/pytest tests --numprocesses=3 --dist=worksteal
AS_USERS_DO = --start-smoke-tests-as-users-do
export BASE HARDWARE OUT TAG

.PHONY: bench damaged dry dry-ci comparisons quick unit smoke test test-all versions test-lowest test-newest check docs dist mutants selftest gpu-day \
	format figures hindsight releases history-figures samples pictures browser slurm podman clean night site compare compare-dry

# Two launches show no slowdown, so times cannot fail it: on a laptop these are noisy. Counts can.
bench: .venv/installed  ## measure a tiny model by every framework, compare with the last time (five minutes)
	.venv/bin/pytest bench_cases/test_cpu.py --perf-record-launches=2 --perf-max-launches=2 --perf-wait-quiet=0 \
		--perf-budget=5min $(ARGS)

comparisons: .venv/installed  ## the tiny twins of the published comparisons, one launch each, and their tables
	rm -rf .perfsuite/comparisons
	.venv/bin/pytest bench_cases -m cpu --ignore bench_cases/test_cpu.py --perf-record-launches=1 \
		--perf-store=.perfsuite/comparisons $(ARGS); status=$$?; \
	.venv/bin/python -m bench_cases.published --store .perfsuite/comparisons && exit $$status

quick: .venv/installed  ## the unit tests of the rooms that differ from BASE (main), and of those above
	tests=$$(.venv/bin/python -m tests.changed $(BASE)) && { [ -z "$$tests" ] || \
		.venv/bin/pytest $$tests -m unit --numprocesses=3 $(ARGS) || [ $$? -eq 5 ]; }

unit: .venv/installed  ## all tests that start no process (five minutes on two cores)
	$(TESTS) -m unit $(ARGS)

smoke: .venv/installed  ## a launch of each framework, and the main paths
	$(TESTS) -m smoke $(AS_USERS_DO) $(ARGS)

test: .venv/installed  ## lint, types, the documentation, and all tests but those marked nightly
	$(MAKE) --jobs=2 --output-sync check docs
	$(TESTS) -m "not nightly" $(ARGS)

test-all: .venv/installed  ## those, too, as CI on GitHub does
	$(MAKE) --jobs=2 --output-sync check docs
	$(TESTS) $(AS_USERS_DO) $(ARGS)

versions:  ## the tests on the lowest torch that pyproject.toml names, and on the newest: 8 GB, half an hour each
	$(MAKE) test-lowest PYTHON=python3.11
	$(MAKE) test-newest PYTHON=python3.13

check: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo
	.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv/bin/zizmor --offline --persona pedantic .github

docs: .venv/installed  ## the documentation with a live report and history in build/docs; warnings are errors
	.venv/bin/sphinx-build --quiet --fail-on-warning --keep-going --doctree-dir build/doctrees docs build/docs
	[ ! -e tests/sample_reports.py ] || .venv/bin/python -m tests.sample_reports build/docs
	[ ! -e tests/features/history/live.py ] || .venv/bin/python -m tests.features.history.live build/docs

dist: .venv-dist/installed  ## TAG=v0.1.0: sdist and wheel in dist/, checked; without TAG whatever the version is
	rm -rf dist
	.venv-dist/bin/python -m build
	.venv-dist/bin/twine check --strict dist/*
	.venv-dist/bin/check-wheel-contents dist/*.whl
	version=$$(basename dist/*.tar.gz .tar.gz); [ "$${TAG:-v$${version#perfsuite-}}" = "v$${version#perfsuite-}" ] || \
		{ echo "the tag is $$TAG, __version__ in perfsuite/__init__.py makes $$version: change one of them"; exit 1; }

test-lowest test-newest: test-%: .venv-%/installed
	.venv-$*/bin/pytest tests --numprocesses=3 -m "not simulation and not browser" $(AS_USERS_DO) $(ARGS)

mutants: .venv/installed  ## SAMPLE=90 SEED=1: change one token at a time, and list what no unit test notices
	nice -n 10 .venv/bin/python -m tests.mutants --sample $(SAMPLE) --seed $(SEED) $(ARGS)

dry: .venv/installed  ## every case that is not for a CPU, at its full size without its hardware (an hour)
	.venv/bin/pytest bench_cases --perf-dry -m "not cpu" --numprocesses=2 --benchmark-disable $(ARGS)

dry-ci:  ## some of them that cover every framework, judged by the reviewed counts (minutes)
	$(MAKE) dry ARGS='-k "$(DRY_CI)" --perf-missing-baseline=fail $(ARGS)'

selftest: .venv/installed  ## inject every fault into real training, and see each caught (some minutes)
	.venv/bin/perfsuite selftest

gpu-day: .venv/installed  ## OUT=out: what only a GPU can show, in four parts (40 minutes; docs/develop/gpu-day.md)
	for part in 1 2 3 4; do tests/gpu/day.sh $$part "$$OUT"; done

figures: .venv/installed  ## what perfsuite itself costs
	.venv/bin/python -m tests.benchmarks.collection
	.venv/bin/python -m tests.benchmarks.overhead
	.venv/bin/python -m tests.benchmarks.report

damaged: .venv/installed  ## COUNT=2000 SEED=0: damaged files and commands; no traceback, hang or wrong green (a quarter of an hour)
	.venv/bin/python -m tests.benchmarks.damaged $(or $(COUNT),2000) 300 $(SEED)

hindsight: .venv/installed  ## PAIR=accelerate-3762: releases with a known regression, and unchanged ones (an hour)
	.venv/bin/python -m tests.benchmarks.hindsight $(PAIR) $(ARGS)

releases: release-accelerate release-transformers release-peft release-lightning release-torch release-trl  ## docs/releases (hours)

release-accelerate: WHAT = --from 1.10.0 -k "(accelerate or trainer) and not lora"
release-transformers: WHAT = --from 5.0.0 --minors -k "llama_train or trainer"
release-peft: WHAT = --from 0.18.0 -k "peft or lora"
release-lightning: WHAT = --from 2.5.0 -k "lightning or fabric"
# On CPUs, where torch's builds for CUDA are run, accelerate does no FSDP: without the script that needs it.
release-torch: WHAT = --from 2.11.0 --minors -k "(accelerate or fabric or llama_train or trainer) and not accumulate"
release-trl: WHAT = --from 1.4.0 --minors -k trl
release-%: .venv/installed  # the lock is its own, as no machine must be quiet
	PERFSUITE_LOCK=$(CURDIR)/.perfsuite/releases.lock .venv/bin/perfsuite releases $* $(WHAT) \
		--cases tests/benchmarks/hindsight/cases.py > docs/releases/$*.new || [ $$? -eq 3 ]
	.venv/bin/python -m tests.benchmarks.hindsight.release_page $* < docs/releases/$*.new > docs/releases/$*.md
	rm docs/releases/$*.new

samples: .venv/installed  ## the samples of reports on the pages, and the pages of commands and options, by today's code
	.venv/bin/python -m tests.sample_reports

pictures: samples  ## docs/images/ by today's code; those of pages need a browser (a minute; 5 if the engine has changed)
	.venv/bin/python -m tests.pictures

browser:  ## Chromium and the scripts of asv's pages for the tests and pictures that need them; as root, or installed before
	command -v chromedriver || { apt-get update -qq && \
	  apt-get install -qq -y --no-install-recommends chromium chromium-driver fonts-dejavu-core; }
	npm install --silent --no-audit --no-fund --no-package-lock --prefix tests/features/history/asv

slurm:  ## Slurm for the tests that need one (they run as root); installed only where that takes no password
	command -v slurmctld && command -v slurmd && command -v srun && command -v munged && command -v ip || { \
	  apt-get update -qq && \
	  apt-get install -qq -y --no-install-recommends slurmctld slurmd slurm-client munge iproute2; }

podman:  ## for the test of an image as an arm; installed only where that takes no password
	command -v podman || { apt-get update -qq && apt-get install -qq -y --no-install-recommends podman runc; }

history-figures: .venv/installed  ## what a long history costs, and how soon a drift is found (half an hour)
	.venv/bin/python -m tests.features.history.figures
	.venv/bin/python -m tests.features.history.drift

format: .venv/installed
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

night: .venv/installed  ## HARDWARE=h100 OUT=out: doctor, self-test, every case of that hardware, report
	.venv/bin/perfsuite night --hardware "$$HARDWARE" --out "$$OUT" -- $(ARGS)

site: docs  ## the documentation in build/site, asv pages of the branch perfsuite-history in build/site/history
	rm -rf build/site build/pages
	cp -r build/docs build/site
	if git rev-parse --quiet --verify origin/perfsuite-history; then \
		.venv/bin/perfsuite history pull && .venv/bin/perfsuite history publish --out build/pages --history history \
		--commit-url "$${GITHUB_SERVER_URL:-https://github.com}/$${GITHUB_REPOSITORY:-}/commit/" && \
		cp -r build/pages/html build/site/history; \
	fi

compare: .venv/installed  ## BASE=main HARDWARE=h100: launch that commit and this one in turn, and compare them
	.venv/bin/perfsuite doctor --quick --expect "$$HARDWARE" || [ $$? -eq 3 ]
	rm -rf .perfsuite/base
	git worktree prune
	git worktree add --force --detach .perfsuite/base "$$BASE"
	$(MAKE) -f "$(CURDIR)/Makefile" -C .perfsuite/base .venv/installed
	.venv/bin/pytest bench_cases -m "$$HARDWARE" --perf-against="$$BASE .perfsuite/base/.venv/bin/python" \
		--perf-report "$$OUT" $(ARGS)

compare-dry: .venv/installed  ## BASE=main: what a step does at that commit and at this one, by dry runs (minutes, no GPU)
	.venv/bin/perfsuite compare --dry --against "$$BASE" -k '$(DRY_CI)' --out "$$OUT" $(ARGS)

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --no-deps --upgrade --target .venv/deepspeed \
		deepspeed hjson msgpack  # for its tests alone: accelerate and the Trainer import it where they find it
	touch $@

.venv-lowest/installed: TORCH = torch==$(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml).*
.venv-newest/installed: TORCH = torch
.venv-%/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	grep -Ev '^(torch|setuptools)==' constraints.txt > .venv-$*/constraints.txt  # torch 2.11 wants setuptools < 82
	.venv-$*/bin/python -m pip install --quiet --constraint .venv-$*/constraints.txt \
		--editable ".[dev]" "$(TORCH)"
	touch $@

.venv-dist/installed: constraints.txt
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --constraint constraints.txt build check-wheel-contents twine
	touch $@

clean:  ## what can be made again; not .perfsuite, where measurements are
	rm -rf .venv .venv-lowest .venv-newest .venv-dist .pytest_cache .mypy_cache .ruff_cache build dist
