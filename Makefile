# Two commands on a fresh machine: `make serve` and `make test`. Every target sets up what it needs by
# itself, with nothing but python3 and make, and only once.

# Any Python from 3.11 on will do to make the environment with.
PYTHON ?= python3
# Where to serve. Left empty, the settings say: QKV_PORT and QKV_HOST, or 8000 and 127.0.0.1.
PORT ?=
# Not ?=: some shells export HOST as the machine's name, and who serves to the network should say so.
HOST =
# More for the command behind most of these: make test ARGS="-k softmax"
ARGS =
IMAGE ?= qkv
PIP_AUDIT = pip-audit==2.10.1
# TORCH_INDEX: a package index to take torch from, where its default build is not the one wanted (on Linux
# that one brings CUDA). Given on the command line or in the environment, it reaches the recipes as it is.

# Another project's environment may be active. Ours is .venv, and no path from outside leads into it.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH

# The stamp holds the path it was made at, since a virtual environment names its own: a copied or moved
# checkout would otherwise go on running the code of the first.
WHOLE := $(shell test -x .venv/bin/python && test "$$(cat .venv/.installed 2>/dev/null)" = "$$(pwd -P)" && echo yes)

.DEFAULT_GOAL := help
.PHONY: help serve test test-rest test-all check docs bench accuracy speed soak fuzz audit image clean again

help: ## show this list
	@sed -n 's/^\([a-z-]*\): .*## /\1	/p' Makefile | while IFS='	' read -r name does; do \
		printf '  make %-9s %s\n' "$$name" "$$does"; done

serve: .venv/.installed ## serve on port 8000 of this machine (PORT=, HOST= for another); Ctrl-C ends it
	@exec .venv/bin/qkv serve $(if $(HOST),--host "$(HOST)") $(if $(PORT),--port "$(PORT)") $(ARGS)

# Two at a time: many tests wait for processes to start and end. ARGS="-n 0" runs them one by one.
PYTEST = .venv/bin/python -m pytest -n 2 --dist worksteal
EXPENSIVE = (process or browser or install or slow) and not representative

test: .venv/.installed ## run most of the tests, some of every kind: about three minutes
	@$(PYTEST) -m "not ($(EXPENSIVE))" --hypothesis-profile=fast $(ARGS)

# Tests of properties run here again, with all their examples.
test-rest: .venv/.installed ## run the tests that make test leaves out, and all examples: about a quarter of an hour
	@$(PYTEST) -m "hypothesis or ($(EXPENSIVE))" $(ARGS)

test-all: .venv/.installed ## run every test, with all examples: about a quarter of an hour
	@$(PYTEST) $(ARGS)

check: .venv/.installed ## lint, formatting, types
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

docs: .venv/.installed ## write the pages made of the variants' files, pictures and all
	@.venv/bin/python docs/make.py

bench: .venv/.installed ## measure what the service costs, into docs/performance.md
	@.venv/bin/python bench/run.py --write $(ARGS)

accuracy: .venv/.installed ## measure every variant against its reference, into docs/accuracy.md
	@.venv/bin/python bench/accuracy.py --write $(ARGS)

speed: .venv/.installed ## time every variant beside plain torch, into docs/speed.md and .svg
	@.venv/bin/python bench/speed.py --write $(ARGS)

soak: .venv/.installed ## ask a service for 20 minutes and look at every answer (ARGS="--minutes 60")
	@.venv/bin/python bench/soak.py $(ARGS)

fuzz: .venv/.installed ## feed changed bodies to every decoder for 10 minutes (ARGS="--minutes 60")
	@.venv/bin/python tests/fuzz_decoders.py $(ARGS)

# In an environment of its own, for it brings two dozen packages that nothing else needs. --strict: what the
# advisory service does not answer for is a failure; without it, pip-audit calls that nothing known.
audit: ## ask for known advisories about what constraints.txt pins (ARGS="-s osv" asks elsewhere)
	@test -x .audit/bin/pip-audit || { $(PYTHON) -m venv --clear .audit && \
		.audit/bin/python -m pip -qq install -c constraints.txt $(PIP_AUDIT); }
	@.audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt $(ARGS)

image: ## build the container image with docker
	docker build --build-arg TORCH_INDEX --tag "$(IMAGE)" .

clean: ## remove the environment and everything else that is made
	rm -rf .venv .audit .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find service tests docs bench -name __pycache__ -prune -exec rm -rf {} +

# The stamp goes first and comes back last, so that an environment left half made is made anew from nothing.
# PIP_CONSTRAINT and PIP_BUILD_CONSTRAINT (what older and newer pips read) pin the build backend too.
.venv/.installed: pyproject.toml constraints.txt $(if $(WHOLE),,again)
	@$(PYTHON) -c 'import sys; sys.exit("qkv needs Python 3.11 or newer; $(PYTHON) is %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@rm -f $@
ifeq ($(WHOLE),yes)
	@echo "qkv: pyproject.toml or constraints.txt changed: updating .venv"
else
	@echo "qkv: first run: installing into .venv, about a minute (longer where torch brings CUDA)"
	@$(PYTHON) -m venv --clear .venv
endif
	@if test -n "$$TORCH_INDEX"; then \
		.venv/bin/python -m pip -qq install -c constraints.txt --no-deps --index-url "$$TORCH_INDEX" torch; fi
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
		.venv/bin/python -m pip -qq install -c constraints.txt -e '.[dev]'
	@pwd -P > $@
