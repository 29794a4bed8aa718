#!/usr/bin/env bash
# Measures krex on this machine's first NVIDIA GPU: what it adds to calls of the driver, and what
# entering and leaving a region takes. Needs an installed krex, cuda-bindings and a C compiler;
# torch for one part. Some minutes; with --quick, one.
#
#   benches/gpu.sh [--quick] [--only PART,…] [--json FILE]
#
# PYTHON is the interpreter (python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
PYTHONPATH=benches${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m gpu --gpu "${gpu:+$gpu (name, driver)}" "$@"
