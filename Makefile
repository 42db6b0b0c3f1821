# Everything is installed with pip into .venv, once; the extension is rebuilt when its sources change.
PYTHON ?= python3
CC ?= cc
BIN := .venv/bin
BUILD_FILES := setup.py pyproject.toml src_c/ffi_build.py $(shell find src_c -name '*.[ch]')
C_FILES = $(shell find src_c src_cuda tests bench -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh')
CHECKED := $(wildcard tests/core/check_*.[ch]) $(shell find mapuot -name '*.py')
ARGS ?=
JOBS ?= 2
WORKERS = -n $(JOBS) --dist loadgroup  # tests are handed out one by one, so that the longest begin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

CFLAGS_check := -g
CFLAGS_asan := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
CFLAGS_tsan := -O1 -g -fsanitize=thread
MINUTES ?= 1
TARGETS ?= core readers arguments

CC_check = $(CC)
CC_asan = $(CC)
CC_tsan = $(CC)
CFLAGS_arm := -O3
CFLAGS_musl := -O3
CC_arm := aarch64-linux-gnu-gcc
ENV_arm := MAPUOT_ISAS=scalar,neon
LDFLAGS_arm := -static
RUN_arm := qemu-aarch64
DEBIAN_arm := gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
CC_musl := musl-gcc
LDFLAGS_musl := -static
DEBIAN_musl := musl-tools

# the tests of tests/api that compare with other libraries, or are of a door to one
DOORS := da divergence docs jax masks points pot torch wot

# what pyproject.toml declares; the newest is what pip finds
PYTHON_oldest ?= python3.10
STACK_oldest := "numpy==1.24.*" "scipy==1.10.*" "cffi==1.15.*" "tqdm==4.60.*" "click==8.0.*" "threadpoolctl==3.1.*"
PYTHON_newest ?= $(firstword $(foreach name,python3.14 python3.13,$(shell command -v $(name))) $(PYTHON))

# zig, from PyPI, compiles the wheels: it has the C libraries of all platforms, so that any machine builds for every other
PLATFORMS := manylinux_2_17_x86_64 manylinux_2_17_aarch64 musllinux_1_2_x86_64 musllinux_1_2_aarch64 \
	macosx_11_0_arm64 macosx_11_0_x86_64
NATIVE = $(if $(filter Darwin,$(shell uname)),macosx_11_0,manylinux_2_17)_$(shell uname -m)
TARGET_manylinux_2_17_x86_64 := x86_64-linux-gnu.2.17
TARGET_manylinux_2_17_aarch64 := aarch64-linux-gnu.2.17
TARGET_musllinux_1_2_x86_64 := x86_64-linux-musl
TARGET_musllinux_1_2_aarch64 := aarch64-linux-musl
TARGET_macosx_11_0_arm64 := aarch64-macos.11.0
TARGET_macosx_11_0_x86_64 := x86_64-macos.11.0
EPOCH = SOURCE_DATE_EPOCH="$$(git log -1 --format=%ct)"
ZIG = $(CURDIR)/$(BIN)/python-zig cc -target $(TARGET_$(1))
MACOS = $(filter macosx%,$(1))
# binaries of the GPU kernels in wheels: minutes of all cores; empty: none
AHEAD ?= yes
# $(1): a platform, $(2): a folder. From a clone: what lies about in the working tree is in no wheel
define build_wheel
rm -rf $(2)/$(1) && git clone -q . $(2)/$(1)
$(if $(AHEAD),$(if $(filter manylinux%,$(1)),cp -r build/ahead $(2)/$(1)/mapuot/_ahead))
cd $(2)/$(1) && $(EPOCH) PYTHONWARNINGS=ignore ZIG_GLOBAL_CACHE_DIR=$(CURDIR)/$(2)-zig ZIG_LOCAL_CACHE_DIR=$(CURDIR)/$(2)-zig \
CC="$(ZIG)" LDSHARED="$(ZIG) -shared -s $(if $(MACOS),-undefined dynamic_lookup)" \
_PYTHON_HOST_PLATFORM=$(if $(MACOS),$(patsubst macosx_11_0_%,macosx-11.0-%,$(1)),linux-$(word 2,$(subst 2_17_, ,$(subst 1_2_, ,$(1))))) \
$(CURDIR)/$(BIN)/python setup.py -q bdist_wheel

endef

.PHONY: help demo pictures test test-all test-gpu sanitize-gpu hostile fuzz mutants soak mpi-2 mpi-3 mpi-4 check check-arm check-musl \
	test-arm wheels wheel check-wheels check-wheel test-oldest test-newest test-doors docs bench lint format asan tsan clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help: ## list what can be made
	@awk -F ':.*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } \
	/^[a-z0-9 -]*:.*## / { line = sprintf("  %-20s", $$1); count = split($$2, words, " "); \
	for (k = 1; k <= count; k++) { if (length(line) + length(words[k]) > 98) { print line; line = sprintf("%22s", "") } \
	line = line " " words[k] } print line }' $(MAKEFILE_LIST)

##@ See it work

demo: $(or $(wildcard .venv/.ext),.venv/.native) .venv/.demo ## recolour one photograph with the palette of another; pictures in build/demo
	$(BIN)/python examples/color_transfer.py $(ARGS)

pictures: .venv/.pictures ## draw the pictures of all examples into build/pictures, and renew those of docs/
	for name in color_transfer barycenters gradient_flow flow_matching label_smoothing masked_training points populations \
	registration density_map shapes; do \
	$(BIN)/python examples/$$name.py --out build/pictures || exit 1; done
	for shown in docs/*.png; do new=build/pictures/$${shown#docs/}; if test -e $$new; then cp $$new $$shown; fi; done

##@ Tests

test: .venv/.test ## run the tests that guard the answers (make test ARGS="-k plan")
	$(BIN)/pytest $(WORKERS) $(ARGS)

test-all: .venv/.test ## run all tests: those of make test, more GPUs, ranks and random problems, the soak, the fuzzing
	$(BIN)/pytest $(WORKERS) -m "" $(ARGS)

test-gpu: .venv/.gpu .venv/.test ## run the tests of the CUDA kernels
	$(BIN)/pytest -m "gpu or compile" $(ARGS)

sanitize-gpu: .venv/.gpu ## the CUDA kernels under compute-sanitizer: memory, then races in shared memory
	compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python tests/cuda/sanitize_cuda.py
	MAPUOT_CUDA=racecheck compute-sanitizer --tool racecheck --error-exitcode 1 $(BIN)/python tests/cuda/sanitize_cuda.py

##@ Tests that search for faults

hostile: .venv/.test ## random problems on every path against an independent answer: ARGS="--count 20000 --seed 7 --only warm"
	PYTHONPATH=tests $(BIN)/python -m hostile $(ARGS)

fuzz: build/asan/.done .venv/.test ## arbitrary bytes as files, as arguments and as numbers of the core, under sanitizers, each for MINUTES=1; TARGETS=core
	for target in $(TARGETS); do $(call sanitized,asan) $(BIN)/python -m soak --only $$target --minutes $(MINUTES) || exit 1; done

mutants: .venv/.test ## change one rule of the library at a time: does the test that is named for it fail? (ARGS="--only plan_error")
	PYTHONPATH=tests $(BIN)/python -m mutants $(ARGS)

soak: .venv/.test ## threads, forks, signals, kills, full disks, little memory, dying ranks (ARGS="--minutes 60")
	PYTHONPATH=tests $(BIN)/python -m soak $(ARGS)

sanitized = LD_PRELOAD="$$($(CC) -print-file-name=lib$(1).so) $$($(CC) -print-file-name=libstdc++.so)" \
	PYTHONPATH=$(CURDIR)/build/$(1)/lib:$(CURDIR)/tests ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1 allocator_may_return_null=1" OPENBLAS_NUM_THREADS=1

asan tsan: %: build/%/.done .venv/.test ## the checker and the tests under the address or thread sanitizer
	build/$@/check_kernels
	$(call sanitized,$@) $(BIN)/pytest $(ARGS)

mpi-2 mpi-3 mpi-4: .venv/.test ## what ranks must do together, on that many
	PYTHONPATH=tests timeout 300 $(BIN)/mpiexec -n $(@:mpi-%=%) $(BIN)/python -m mpi4py tests/mpi/cases.py

check: build/check/.done ## compare every C kernel with its scalar twin
	build/check/check_kernels $(ARGS)

check-arm check-musl: check-%: ## the same on aarch64 (by qemu), with musl; skipped where their compilers are missing
	@for tool in $(CC_$*) $(RUN_$*); do command -v $$tool >/dev/null || \
	{ echo "$@: skipped, there is no $$tool. Debian: apt install $(DEBIAN_$*)"; exit 0; }; done; \
	$(MAKE) --no-print-directory build/$*/.done && $(RUN_$*) build/$*/check_kernels $(ARGS)

test-arm: ## a slice of the tests on aarch64, by qemu; ARM_ROOT: a Debian for arm64 with Python (CONTRIBUTING.md)
	@for tool in $(CC_arm) $(RUN_arm) "$(ARM_ROOT)/usr/bin/python3"; do command -v "$$tool" >/dev/null || \
	{ echo "$@: skipped, there is no $$tool. Debian: apt install $(DEBIAN_arm); ARM_ROOT: CONTRIBUTING.md"; exit 0; }; done; \
	$(MAKE) --no-print-directory build/arm-python/.done && $(RUN_arm) -L $(ARM_ROOT) \
	-E PYTHONPATH=build/arm-python/lib:$(ARM_ROOT)/packages -E OPENBLAS_NUM_THREADS=1 $(ARM_ROOT)/usr/bin/python3 -P \
	-m pytest -p no:cacheprovider $(or $(ARGS),tests/core/test_kernels.py tests/core/test_log_matmul.py)

##@ Packages

# auditwheel repairs wheels of the machine that it runs on only, and reads no musl but there
tag_wheel = cp build/wheels/$(1)/dist/*.whl build/wheels/$(1)/ && \
	$(EPOCH) $(BIN)/wheel tags --remove --platform-tag $(1) build/wheels/$(1)/*.whl && mv build/wheels/$(1)/*.whl dist/

wheels: .venv/.wheel $(if $(AHEAD),$(if $(filter manylinux%,$(PLATFORMS)),build/ahead/.done)) ## sdist and wheels of the last commit for all PLATFORMS, audited, into dist
	rm -rf dist build/wheels && mkdir -p dist
	$(foreach platform,$(PLATFORMS),$(call build_wheel,$(platform),build/wheels))
	cd build/wheels/$(firstword $(PLATFORMS)) && $(EPOCH) PYTHONWARNINGS=ignore $(CURDIR)/$(BIN)/python setup.py -q sdist -d $(CURDIR)/dist
	for platform in $(PLATFORMS); do case $$platform in \
	macosx*) cp build/wheels/$$platform/dist/*.whl dist/;; \
	$(NATIVE)) PATH="$(CURDIR)/$(BIN):$$PATH" $(EPOCH) $(BIN)/auditwheel repair --plat $$platform --wheel-dir dist build/wheels/$$platform/dist/*.whl;; \
	manylinux*) $(BIN)/auditwheel show build/wheels/$$platform/dist/*.whl | grep -F "\"$$platform\"" && $(call tag_wheel,$$platform);; \
	*) $(call tag_wheel,$$platform);; \
	esac || exit 1; done
	$(BIN)/abi3audit --strict dist/*.whl
	$(BIN)/twine check --strict dist/*
	@cd dist && ls -l && sha256sum *

wheel: ## sdist and the wheel of this machine alone; its GPU kernels are compiled on first use
	$(MAKE) --no-print-directory wheels PLATFORMS=$(NATIVE) AHEAD=

# binaries of the CUDA kernels, for the platforms that CuPy has wheels for
build/ahead/.done: .venv/.test $(wildcard src_cuda/* src_cuda/*/*) $(wildcard src_c/common/*) \
$(wildcard mapuot/backends/*.py) $(wildcard mapuot/backends/cuda/*.py) $(wildcard mapuot/problem/*.py)
	rm -rf build/ahead
	PYTHONPATH=tests/cuda/cuda_on_cpu $(BIN)/python src_cuda/ahead.py build/ahead
	@touch $@

check-wheels: wheels ## another build of them, compared
	rm -rf build/wheels-again build/wheels-again-zig
	$(foreach platform,$(PLATFORMS),$(call build_wheel,$(platform),build/wheels-again))
	for platform in $(PLATFORMS); do \
	cmp build/wheels/$$platform/dist/*.whl build/wheels-again/$$platform/dist/*.whl || exit 1; done

check-wheel: wheel ## what it holds; wheel (without a compiler) and sdist installed and used
	@! $(BIN)/python -m zipfile -l dist/*.whl | grep -E 'ffi_build|bench|tests'
	@! tar tf dist/*.tar.gz | grep -E 'bench/results|\.(png|gif|so)$$'
	rm -rf build/clean-wheel build/clean-sdist
	$(PYTHON) -m venv build/clean-wheel && $(PYTHON) -m venv build/clean-sdist
	cd build/clean-wheel && PATH="$$PWD/bin" bin/pip install -q ../../dist/*.whl && \
	PATH="$$PWD/bin" bin/python ../../tests/installed.py ../../README.md .
	cd build/clean-sdist && bin/pip install -q ../../dist/*.tar.gz && bin/python ../../tests/installed.py ../../README.md .

# the wheel with the oldest and the newest that it runs on; the oldest OpenBLAS's threads wait by yielding, for minutes
# where others need the cores
test-oldest test-newest: test-%: wheel ## all tests with the oldest and the newest libraries that a wheel runs on
	@$(PYTHON_$*) -c '' 2>/dev/null || { echo "$@: skipped, there is no $(PYTHON_$*)"; exit 0; }; \
	rm -rf build/$* && $(PYTHON_$*) -m venv build/$* && \
	$(BIN)/pip --python build/$*/bin/python install -q $(STACK_$*) --group test dist/*.whl && \
	OPENBLAS_NUM_THREADS=1 build/$*/bin/pytest -p no:cacheprovider $(ARGS)

test-doors: wheel ## the tests of the doors beside the libraries that users come from, in an environment of their own
	rm -rf build/doors && $(PYTHON) -m venv build/doors && \
	$(BIN)/pip --python build/doors/bin/python install -q --group test --group doors dist/*.whl && build/doors/bin/pip install -q --no-deps wot && \
	build/doors/bin/pytest -p no:cacheprovider $(or $(ARGS),$(DOORS:%=tests/api/test_%.py))

##@ The house

docs: .venv/.docs .venv/.test ## the site into build/docs: warnings are errors, the gallery is run, code blocks are tested
	$(BIN)/pytest -q -p no:cacheprovider tests/api/test_docs.py
	MPLBACKEND=agg $(BIN)/sphinx-build -q -W --keep-going -d build/doctrees docs build/docs $(ARGS)
	@echo "build/docs/index.html: $$(find build/docs -name '*.html' | wc -l) pages"

bench: .venv/.bench ## measure every claim against POT, into build/bench (make bench ARGS=pass for a part)
	$(BIN)/python -m bench $(or $(ARGS),all)

lint: .venv/.lint ## ruff, mypy and clang-format, check only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/api/user_types.py tests/api/user_mistakes.py
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)

format: .venv/.lint ## rewrite the sources in the house format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

clean: ## remove all that was built or installed here
	rm -rf .venv build dist *.egg-info mapuot/*.so .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/.pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo "mapuot needs Python 3.10 or later: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	{ echo "Python's venv is incomplete. Debian, Ubuntu: apt install python3-venv" >&2; exit 1; }
	@test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || \
	{ echo "Python.h is missing. Debian, Ubuntu: apt install python3-dev" >&2; exit 1; }
	@echo "making .venv, an environment of Python for this folder"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -q --upgrade "pip>=25.1" "setuptools>=77" cffi
	@touch $@

# all instruction sets of this kind of machine, or for the demonstration alone the best that this one has: a third of the work
.venv/.native: ISAS = $(shell $(CC) -march=native -dM -E -x c /dev/null 2>/dev/null | \
sed -n 's/.*__AVX2__.*/avx2/p; s/.*__AVX512BW__.*/avx512/p; s/.*__ARM_NEON .*/neon/p' | sort | tail -n 1)
.venv/.ext .venv/.native: .venv/.pip $(BUILD_FILES)
	@echo "compiling the C library, and installing NumPy and SciPy: a minute on idle cores, for the demonstration less"
	@$(if $(ISAS),MAPUOT_ISAS=$(ISAS)) PYTHONWARNINGS=ignore $(BIN)/pip install -q --no-build-isolation -e .
	@touch $@

# dependency groups of pyproject.toml, and the extra for a GPU
.venv/.pictures .venv/.test .venv/.bench .venv/.lint .venv/.docs: .venv/.ext
.venv/.demo .venv/.pictures .venv/.test .venv/.bench .venv/.lint .venv/.docs .venv/.wheel: .venv/.%: .venv/.pip
	@echo "installing what $* needs, from PyPI"
	@$(BIN)/pip install -q --group $*
	@touch $@

.venv/.gpu: .venv/.ext
	$(BIN)/pip install -q 'mapuot[gpu]'
	@touch $@

# a build of its own beside .venv, and the C checker linked with the same objects
define link_checker
	$(CC_$*) -std=c11 -D_GNU_SOURCE -Wall -Wextra -pthread $(CFLAGS_$*) -Isrc_c -o build/$*/check_kernels \
	tests/core/check_kernels.c $$(find build/$* -path '*/src_c/*.o') $(LDFLAGS_$*) -lm
	@touch $@
endef

build/check/.done build/asan/.done build/tsan/.done: build/%/.done: .venv/.ext $(CHECKED)
	rm -rf build/$*
	CFLAGS="$(CFLAGS_$*)" $(BIN)/python setup.py -q build --build-base build/$* --build-lib build/$*/lib
	$(link_checker)

build/arm-python/.done: .venv/.ext
	rm -rf build/arm-python
	CC="$(CC_arm)" $(ENV_arm) CFLAGS="$(addprefix -I$(ARM_ROOT)/usr/include,/python3.11 /)" \
	$(BIN)/python setup.py -q build --build-base build/arm-python --build-lib build/arm-python/lib
	@touch $@

# the core alone, for another machine or C library
build/arm/.done build/musl/.done: build/%/.done: .venv/.ext $(CHECKED)
	rm -rf build/$*
	CC="$(CC_$*)" $(ENV_$*) CFLAGS="$(CFLAGS_$*)" $(BIN)/python setup.py -q build_ext --core --build-temp build/$*
	$(link_checker)
