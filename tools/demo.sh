#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# From a fresh clone to a model that writes: packages, build, model, run. The model (94 MiB) runs
# inside a budget of 64 MiB: on the GPU, or on the simulated one where there is none.
set -eu
cd "$(dirname "$0")/.."
prompt=${1:-"Explain in two sentences why the sky is blue."}

# The CUDA library for the GPU that is here alone, and not at all without one: it is the slow part
# of the build.
gpu=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
case $gpu in
[1-9][0-9]*) args="-DSLUICE_CUDA_ARCHS=$gpu" targets=all device=auto ;;
*) args="-DSLUICE_CUDA=OFF" targets=sluice device=sim ;;
esac

tools/setup.sh
SLUICE_CMAKE_ARGS="$args ${SLUICE_CMAKE_ARGS:-}" tools/build.sh release $targets
tools/fetch-models.sh smollm2
set -- build/release/bin/sluice run -m models/SmolLM2-135M-Instruct.Q4_1.gguf --vram 64M -n 64 \
    --device $device --stats -cnv -p "$prompt"
echo "+ $*" >&2
exec "$@" </dev/null # one answer, no conversation
