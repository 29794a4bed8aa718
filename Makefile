# Everything here works in a fresh clone on Linux with Rust (cargo, rustfmt, clippy),
# Python 3.10 or newer (with venv) and make. Virtual environments are made as needed.

PYTHON ?= python3
CARGO ?= cargo

# Run one recipe at a time: they share cargo's target directories.
.NOTPARALLEL:
.DELETE_ON_ERROR:
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# What goes into the wheel. Directories count too: their times tell of removed files.
SOURCES := $(shell find rust python build_backend -name __pycache__ -prune -o ! -name '*.so' -print) \
	Cargo.toml Cargo.lock pyproject.toml LICENSE $(wildcard README.md)

# A directory of its own for the test build: switching features in a shared one would
# rebuild the crates at each turn.
HOOKS_TARGET := $(CURDIR)/target/test-hooks

# $(call wheel,DIRECTORY,ENVIRONMENT): build the wheel, alone, into a directory. The
# backend's tools come from .venv-build, so nothing is downloaded for each build.
wheel = rm -rf $(1) && mkdir -p $(1) && env PATH="$(CURDIR)/.venv-build/bin:$$PATH" $(2) \
	.venv-build/bin/python -m pip wheel --quiet --no-build-isolation --no-deps -w $(1) .

# $(call install,VENV,DIRECTORY,EXTRA): install that wheel and what its extra needs.
install = test -x $(1)/bin/python || $(PYTHON) -m venv $(1); \
	$(1)/bin/python -m pip install --quiet --no-deps --force-reinstall $(2)/*.whl && \
	$(1)/bin/python -m pip install --quiet "$$(echo $(2)/*.whl)[$(3)]"

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- use ---

.PHONY: build
build: .venv/.installed ## build krex and install it into .venv

.PHONY: demo
demo: .venv/.installed ## show the main job: solo, ungated and with krex (fails if it does not show)
	.venv/bin/python benches/demo.py

.PHONY: bench
bench: .venv/.installed ## measure what krex costs, as a table and JSON
	.venv/bin/python benches/run.py

.PHONY: bench-gpu
bench-gpu: .venv/.installed ## measure what krex costs on this machine's first NVIDIA GPU
	PYTHON=.venv/bin/python benches/gpu.sh

.PHONY: wheel
wheel: .venv-build/.zig ## build the portable wheel (manylinux_2_17) into dist/
	$(call wheel,dist,KREX_BUILD_GLIBC=2.17)
	@ls -l dist

# --- tests ---

.PHONY: test
test: test-rust test-python ## run all tests

.PHONY: test-rust
test-rust: .venv-test/.installed ## run the Rust tests, natively and under loom
	$(CARGO) test --locked --workspace
	CARGO_TARGET_DIR=target/loom RUSTFLAGS="--cfg loom" \
		$(CARGO) test --locked --release -p krex-core --test loom

.PHONY: test-python
test-python: .venv-test/.installed build/simgpu/libcuda.so.1 ## run the Python tests
	.venv-test/bin/python -m pytest tests

.PHONY: test-long
test-long: .venv-test/.installed build/simgpu/libcuda.so.1 ## run the Python tests with 10,000 schedules
	KREX_TEST_SCHEDULES=10000 .venv-test/bin/python -m pytest tests -o timeout=14400

.PHONY: test-gpu
test-gpu: .venv-test/.installed ## run the tests that need a real NVIDIA GPU, on the first one
	PYTHON=.venv-test/bin/python tests/gpu/run.sh

.PHONY: test-sabotage
test-sabotage: .venv-test/.installed build/simgpu/libcuda.so.1 ## break each step and invariant; a test must notice
	.venv-test/bin/python tests/sabotage.py

# --- checks ---

.PHONY: lint
lint: lint-rust lint-python ## run all checks that need no tests

.PHONY: lint-rust
lint-rust: fmt clippy

.PHONY: fmt
fmt:
	$(CARGO) fmt --all --check

.PHONY: clippy
clippy:
	$(CARGO) clippy --locked --workspace --all-targets --all-features -- -D warnings

.PHONY: lint-python
lint-python: ruff mypy stubtest

.PHONY: ruff
ruff: .venv-test/.installed
	.venv-test/bin/python -m ruff check .
	.venv-test/bin/python -m ruff format --check .

.PHONY: mypy
mypy: .venv-test/.installed
	.venv-test/bin/python -m mypy

.PHONY: stubtest
stubtest: .venv-test/.installed
	.venv-test/bin/python -m mypy.stubtest krex._krex

# --- what the targets above stand on ---

.venv-build/.maturin:
	$(PYTHON) -m venv .venv-build
	.venv-build/bin/python -m pip install --quiet "maturin>=1.9.4,<2"
	@touch $@

# zig links against any glibc from 2.17 on, whatever the machine has.
.venv-build/.zig: .venv-build/.maturin
	.venv-build/bin/python -m pip install --quiet "ziglang>=0.13" "cargo-zigbuild>=0.20"
	@touch $@

build/release/.built: $(SOURCES) .venv-build/.maturin
	$(call wheel,build/release,)
	@touch $@

build/test-hooks/.built: $(SOURCES) .venv-build/.maturin
	$(call wheel,build/test-hooks,KREX_BUILD_FEATURES=test-hooks CARGO_TARGET_DIR=$(HOOKS_TARGET))
	@touch $@

# The driver for tests on machines without a GPU, under the driver's own name.
build/simgpu/libcuda.so.1: $(shell find rust/krex-simgpu -type f) Cargo.toml Cargo.lock
	$(CARGO) build --locked --release -p krex-simgpu --target-dir target
	mkdir -p $(@D)
	cp target/release/libkrex_simgpu.so $@.new
	mv $@.new $@

.PHONY: simgpu
simgpu: build/simgpu/libcuda.so.1 ## build the driver for tests without a GPU

.venv/.installed: build/release/.built
	$(call install,.venv,build/release,bench)
	@touch $@

.venv-test/.installed: build/test-hooks/.built
	$(call install,.venv-test,build/test-hooks,dev)
	@touch $@

.PHONY: clean
clean: ## remove everything that was built here
	rm -rf target build dist .venv .venv-build .venv-test .mypy_cache .pytest_cache .ruff_cache
