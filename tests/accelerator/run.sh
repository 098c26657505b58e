#!/usr/bin/env bash
# Kernels and engine on a CUDA machine: suites, benchmark, results in a file. Under 8 minutes.
#
# tests/accelerator/run.sh [FILE]   FILE defaults to accelerator-results.txt in $OUT or here.
# PYTHON names an interpreter that has torch with CUDA, triton and this package's dependencies.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
results=${1:-${OUT:-.}/accelerator-results.txt}

# The package as it lies here, without an installation.
imports=$(mktemp -d)
trap 'rm -rf "$imports"' EXIT
mkdir "$imports/servespec"
for part in reference fast conformance; do ln -s "$PWD/$part" "$imports/servespec/$part"; done
export PYTHONPATH="$imports${PYTHONPATH:+:$PYTHONPATH}" SERVESPEC_BACKEND=cuda

servespec() { timeout "$1" "$python" -c 'from servespec.conformance.cli import main; main()' "${@:2}"; }
step() {
    echo "== $*"
    servespec "$@" 2>&1
    local status=$?
    echo "== exit $status"
    ((failed |= status != 0))
}

failed=0
{
    date -u
    "$python" -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())'
    step 20 implementations
    step 180 check --suite kernels --cases 160 --jobs 4 --out "${OUT:-.}/servespec-cases"
    step 180 check --suite model --suite engine --suite engine-bfloat16 --suite invariance \
        --cases 40 --jobs 4 --out "${OUT:-.}/servespec-cases"
    step 90 bench kernels --rounds 15 --device cuda
} > "$results"
cat "$results"
exit "$failed"
