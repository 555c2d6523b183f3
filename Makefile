PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
OLDEST_TRANSFORMERS := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
# further arguments of `make quickstart`, `make test` and others, e.g. ARGS="--trainer.max_steps 5"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test test-changed test-all matrices parity parity-oldest compatibility test-newest test-cuda-build docs lint clean

help: ## List the targets
	@sed -n 's/^\([a-z%-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 16

venv: $(INSTALLED) ## Make .venv with the package, its tools and the pinned versions

# Some distributions ship python3 without ensurepip; pip then installs a pip into the new environment from outside.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv || \
		{ $(PYTHON) -m venv --clear --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install -e '.[dev,docs]' -c constraints.txt
	touch $@

quickstart: venv ## Train a small model on this machine
	$(BIN)/lightning-fsdp2 quickstart $(ARGS)

# Ranks are forks; huge pages, where the system grants them on request, make a fork of a large process cheaper.
test test-changed test-all matrices: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1

test: venv ## Run the tests that every change must pass
	$(BIN)/python tools/run_tests.py fast $(ARGS)

test-changed: venv ## Run the tests that a change can reach, the most likely to fail first, for ten minutes at most
	$(BIN)/python tools/run_tests.py changed $(ARGS)

test-all: venv ## Run all tests but those of a release, go on where an interrupted run stopped, write docs/test-all.md
	$(BIN)/python tools/run_tests.py all $(ARGS)

matrices: venv ## Run also whole matrices and the checks of a release, write docs/matrices.md
	$(BIN)/python tools/run_tests.py matrices $(ARGS)

parity: venv ## Compare all model families, with images too, on parallel layouts with one process, write docs/parity*.md and docs/models.md
	$(BIN)/python tools/parity_matrix.py --output docs/parity.md
	$(BIN)/python tools/parity_matrix.py --context --output docs/parity-context-parallel.md
	$(BIN)/python tools/parity_matrix.py --megatron --output docs/parity-megatron.md
	$(BIN)/python tools/parity_matrix.py --images --output docs/parity-images.md
	$(BIN)/python tools/parity_matrix.py --pipelines --output docs/parity-pipeline-parallel.md
	$(BIN)/python tools/parity_matrix.py --experts --output docs/parity-expert-parallel.md
	$(BIN)/python tools/parity_matrix.py --expert-images --output docs/parity-expert-parallel-images.md
	$(BIN)/python tools/supported_models.py --output docs/models.md

parity-oldest: venv ## The same with the oldest transformers that pyproject.toml allows, in .venv-oldest
	test -x .venv-oldest/bin/python || $(BIN)/python -m venv --without-pip .venv-oldest
	grep -v -e '^transformers==' -e '^huggingface_hub==' constraints.txt > .venv-oldest/constraints.txt
	$(BIN)/python -m pip --python .venv-oldest/bin/python install -e '.[dev]' \
		transformers==$(OLDEST_TRANSFORMERS).0 -c .venv-oldest/constraints.txt
	.venv-oldest/bin/python tools/parity_matrix.py --output docs/parity-transformers-$(OLDEST_TRANSFORMERS).md
	.venv-oldest/bin/python tools/parity_matrix.py --experts \
		--output docs/parity-expert-parallel-transformers-$(OLDEST_TRANSFORMERS).md

compatibility: venv ## Try every option of the Trainer under every strategy, write docs/compatibility.md
	$(BIN)/python tools/compatibility.py --output docs/compatibility.md

# for example `make test-torch-2.11.0`, several gigabytes from PyPI; an older torch wants an older setuptools
test-torch-%: venv ## Run what depends on torch most with another version of it, in .venv-torch-VERSION
	test -x .venv-torch-$*/bin/python || $(BIN)/python -m venv --without-pip .venv-torch-$*
	grep -v -e '^torch==' -e '^setuptools==' constraints.txt > .venv-torch-$*/constraints.txt
	$(BIN)/python -m pip --python .venv-torch-$*/bin/python install -e '.[dev]' torch==$* \
		-c .venv-torch-$*/constraints.txt
	.venv-torch-$*/bin/python -m pytest -m "not release" tests/test_flags.py tests/test_flags_together.py $(ARGS)
	.venv-torch-$*/bin/python -m pytest -m "not release" tests/parallel tests/test_parallelizer.py tests/checkpoint \
		tests/compat/test_attention_kernels.py tests/strategies/test_context_parallel.py \
		tests/strategies/test_hybrid_sharding.py tests/strategies/test_conformance.py tests/strategies/test_ddp.py \
		tests/strategies/test_megatron_fsdp.py tests/managers $(ARGS)

# what depends on transformers most; the self-check in tests/compat names what a version has moved
OF_TRANSFORMERS := tests/compat tests/parallel tests/models tests/weights tests/export tests/modules

# for example `make test-transformers-5.17.0`; an older transformers wants an older huggingface_hub
test-transformers-%: venv ## Run what depends on transformers most with another version of it, in .venv-transformers-VERSION
	test -x .venv-transformers-$*/bin/python || $(BIN)/python -m venv --without-pip .venv-transformers-$*
	grep -v -e '^transformers==' -e '^huggingface_hub==' constraints.txt > .venv-transformers-$*/constraints.txt
	$(BIN)/python -m pip --python .venv-transformers-$*/bin/python install -e '.[dev]' transformers==$* \
		-c .venv-transformers-$*/constraints.txt
	.venv-transformers-$*/bin/python -m pytest -m "not slow and not release" $(OF_TRANSFORMERS) $(ARGS)

# without constraints; --no-deps then takes a transformers beyond the upper end of pyproject.toml
test-newest: venv ## Run the self-check and what depends on other packages most with the newest of everything, in .venv-newest
	test -x .venv-newest/bin/python || $(BIN)/python -m venv --without-pip .venv-newest
	$(BIN)/python -m pip --python .venv-newest/bin/python install --upgrade --upgrade-strategy eager -e '.[dev]'
	$(BIN)/python -m pip --python .venv-newest/bin/python install --upgrade --no-deps transformers
	.venv-newest/bin/python -m pytest tests/compat/test_transformers.py
	.venv-newest/bin/python -m pytest -m "not slow and not release" $(OF_TRANSFORMERS) tests/strategies tests/data $(ARGS)

# torch===VERSION leaves out builds for the CPU, whose versions end in +cpu; gigabytes from PyPI
test-cuda-build: venv ## Run steps on fake CUDA tensors with the CUDA build of torch, in .venv-cuda; no GPU needed
	test -x .venv-cuda/bin/python || $(BIN)/python -m venv --without-pip .venv-cuda
	$(BIN)/python -m pip --python .venv-cuda/bin/python install -e '.[dev]' torch===$(TORCH) -c constraints.txt
	torch=$$(.venv-cuda/bin/python -c 'import torch; print(torch.__path__[0])') && \
		$(CXX) -std=c++20 -shared -fPIC -I$$torch/include tests/helpers/cuda_stub.cpp -o .venv-cuda/cuda_stub.so \
		-L$$torch/lib -ltorch_cpu -lc10 -Wl,-rpath,$$torch/lib
	CUDA_VISIBLE_DEVICES= LD_PRELOAD=$(CURDIR)/.venv-cuda/cuda_stub.so .venv-cuda/bin/python -m pytest \
		tests/cuda_build tests/compat/test_attention_kernels.py $(ARGS)

test-megatron-%: venv ## Run what stands on megatron-fsdp with another version of it, in .venv-megatron-VERSION
	$(BIN)/python -m pip install --upgrade --no-deps --target .venv-megatron-$* megatron-fsdp==$*
	PYTHONPATH=.venv-megatron-$* $(BIN)/python -m pytest -m "not release" -k megatron tests/strategies tests/managers $(ARGS)

docs: venv ## Build the documentation into site/, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: docs ## Check style, format, types, launch scripts and images, and that the documentation is whole
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck --severity=warning examples/slurm/*.sbatch examples/torchrun/*.sh
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cpu

clean: ## Remove caches, builds and the ledgers of tests and parity, but not the environments
	rm -rf .mypy_cache .pytest_cache .ruff_cache .mutants .test .parity build dist site *.egg-info
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
