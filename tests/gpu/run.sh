#!/usr/bin/env bash
# Tests krex on this machine's first NVIDIA GPU. Needs an installed krex, pytest, pytest-timeout and
# cuda-bindings; torch, Triton, CuPy, JAX and nvcc are used where they are.
#
#   tests/gpu/run.sh [PYTEST'S OPTIONS…]                  # the driver contract, too:
#   tests/gpu/run.sh tests/test_driver_contract.py
#
# PYTHON is the interpreter (python3); KREX_GPU_REGIONS says how many regions per line of the tables
# (30); KREX_GPU_RESULTS is the file for the tables as JSON.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}

echo "kernel:  $(uname -sr)"
freezer=$("$python" - <<'PROGRAM'
import os, subprocess, sys, sysconfig, tempfile
krex = os.path.join(sysconfig.get_path("scripts"), "krex")
code = "from krex.region import critical\nwith critical() as it: pass\nprint(it.report.freezer)"
with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
    environment = dict(os.environ, KREX_RUNTIME_DIR=directory)
    # A sibling, since without one nobody is frozen.
    sibling = subprocess.Popen(
        [krex, "run", "--", "sh", "-c", "echo ready; exec sleep 60"],
        env=environment, stdout=subprocess.PIPE,
    )
    try:
        sibling.stdout.readline()
        done = subprocess.run([krex, "run", "--", sys.executable, "-c", code], env=environment,
                              text=True, stdout=subprocess.PIPE, timeout=60, check=True)
    finally:
        sibling.kill()
        sibling.wait()
        subprocess.run([krex, "recover", "--purge"], env=environment, capture_output=True)
print(done.stdout.strip())
PROGRAM
)
echo "freezer: $freezer"
driver=$(nvidia-smi --query-gpu=name,driver_version,uuid --format=csv,noheader 2>/dev/null | head -n 1) || true
echo "driver:  ${driver:-none}"
if [ "$freezer" != cgroup2 ]; then
    echo "run.sh: the tables are about the freezer cgroup2; here it is $freezer: krex doctor says why" >&2
    exit 1
fi
if [ -z "$driver" ] && [ "${KREX_TEST_DRIVER:-real}" = real ]; then
    echo "run.sh: nvidia-smi shows no GPU" >&2
    exit 1
fi
export KREX_TEST_DRIVER=${KREX_TEST_DRIVER:-real}
exec "$python" -m pytest tests/gpu -p no:cacheprovider --tb=short "$@"
