# SPDX-License-Identifier: Apache-2.0
# Short names for the work of every day. The build itself is CMake's (CMakePresets.json).

.PHONY: all demo check test format lint setup models install clean

all:
	@tools/setup.sh
	@tools/build.sh release

# Set up, build, get a small model and let it write inside a VRAM budget.
demo:
	@tools/demo.sh

# All that a change must pass; what CI runs.
check:
	@tools/check.sh

# The tests of the working build alone.
test:
	@tools/build.sh dev
	@ctest --preset dev -L quick

format:
	@git ls-files -z --cached --others --exclude-standard '*.c' '*.h' '*.cpp' '*.cu' '*.cuh' | \
	    xargs -0 clang-format -i

lint:
	@python3 tools/check-style.py
	@python3 tools/check-includes.py

setup:
	@tools/setup.sh

models:
	@tools/fetch-models.sh

install: all
	@cmake --install build/release

clean:
	@rm -rf build
