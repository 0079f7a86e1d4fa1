#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Everything that a change must pass, on any machine: the release build with all tests, the quick
# tests under the address and undefined-behaviour sanitizers, the threaded ones under the thread
# sanitizer. The style checks are tests too. Without network: SLUICE_OFFLINE=1 skips the tests that
# need real models. The last line counts test programs.
set -eu
cd "$(dirname "$0")/.."

n_passed=0
n_failed=0
n_skipped=0

attribute() { # name, file: an attribute of the test suite in a JUnit report
    sed -n '/<testsuite/,/>/p' "$2" | tr '\n' ' ' |
        sed -n "s/^[^>]*[[:space:]]$1=\"\([0-9]*\)\".*/\1/p"
}

# run_tests PRESET WRAPPER... -- CTEST-OPTION...
run_tests() {
    preset=$1
    shift
    wrapper=""
    while [ "$1" != -- ]; do
        wrapper="$wrapper $1"
        shift
    done
    shift
    report=$PWD/build/$preset/tests.xml
    rm -f "$report"
    echo "== tests: $preset"
    # shellcheck disable=SC2086 # a command line
    $wrapper ctest --test-dir "build/$preset" --output-on-failure -j 2 \
        --output-junit "$report" "$@" || true
    if [ ! -s "$report" ]; then
        echo "check: the tests of $preset did not run" >&2
        n_failed=$((n_failed + 1))
        return
    fi
    all=$(attribute tests "$report")
    failed=$(attribute failures "$report")
    skipped=$(($(attribute skipped "$report") + $(attribute disabled "$report")))
    if [ "$all" -eq 0 ]; then
        echo "check: $preset has no tests" >&2
        failed=1
        all=1
    fi
    n_passed=$((n_passed + all - failed - skipped))
    n_failed=$((n_failed + failed))
    n_skipped=$((n_skipped + skipped))
}

build() { # preset, targets: a failure ends the check, with its closing line
    echo "== build: $1"
    if ! tools/build.sh "$@"; then
        echo "check: the build of $1 failed" >&2
        echo "$n_passed passed, $((n_failed + 1)) failed, $n_skipped skipped"
        exit 1
    fi
}

tools/setup.sh check
[ -n "${SLUICE_OFFLINE:-}" ] || tools/fetch-models.sh

build check
run_tests check --

build asan-ubsan
run_tests asan-ubsan -- -L quick

build tsan threaded_tests
# The thread sanitizer of gcc 12 cannot map its shadow under much address randomization.
fixed=""
if setarch "$(uname -m)" -R true 2>/dev/null; then
    fixed="setarch $(uname -m) -R"
fi
# Everything takes ten times as long there.
SLUICE_RANDOM_CASES=${SLUICE_RANDOM_CASES:-60}
export SLUICE_RANDOM_CASES
# shellcheck disable=SC2086 # a command line
run_tests tsan $fixed -- -L threads

echo "$n_passed passed, $n_failed failed, $n_skipped skipped"
[ "$n_failed" -eq 0 ]
