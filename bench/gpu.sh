#!/bin/sh
# Tests and measures on a machine with a CUDA GPU and no network; bench/gpu/call.py, and --help, say more.
here=$(dirname "$0")
PYTHONPATH="$here" exec "${PYTHON:-python3}" -m gpu.call "$@"
