#!/usr/bin/env bash
# Build, test and measure on a machine with a CUDA GPU, in under nine minutes, offline.
#
#   bench/gpu.sh [--device cuda|cpu] [--python PYTHON] [--commit TEXT] [--phases "NAME,..."] OUT_FOLDER
#
# Builds for the present GPU only, into this checkout; runs the GPU tests, compute-sanitizer where it is there,
# and the benchmarks. Needs Python with torch >= 2.11, triton, transformers, peft, pytest, pytest-timeout, and
# what builds: nvcc, a C++ compiler, cmake, ninja, setuptools, pybind11; the phase "memory limit" also needs the
# rest of what pyproject.toml lists for mlora. A phase that fails or runs out of time
# stops none after it; the exit code is 1 then, and the table at the end says which. `--device cpu` goes
# through the same phases on the CPU with tiny sizes, to try this script: its figures show nothing. `--phases
# "build,tests"` goes through these phases only, of: build, odd shapes, tests, kinds of adapters, runs, memory
# limit, pipeline, launches, suite, tests of the suite, memcheck, racecheck; other results in OUT_FOLDER stay.
set -euo pipefail

device=cuda python=python3 commit="" out="" phases=""
usage() { echo "bench/gpu.sh: $1; usage: $(sed -n '4s/^# *//p' "$0")" >&2; exit 2; }
help() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0; }
while [ $# -gt 0 ]; do
  case "$1" in
    --device) [ $# -ge 2 ] || usage "--device: expected a value"; device=$2; shift 2 ;;
    --python) [ $# -ge 2 ] || usage "--python: expected a value"; python=$2; shift 2 ;;
    --commit) [ $# -ge 2 ] || usage "--commit: expected a value"; commit=$2; shift 2 ;;
    --phases) [ $# -ge 2 ] || usage "--phases: expected a value"; phases=$2; shift 2 ;;
    -h | --help) help ;;
    -*) usage "$1: no such option" ;;
    *) [ -z "$out" ] || usage "expected one folder, got $out and $1"; out=$1; shift ;;
  esac
done
[ -n "$out" ] || usage "expected a folder for the results"
known="build,odd shapes,tests,kinds of adapters,runs,memory limit,pipeline,launches,suite,tests of the suite,memcheck,racecheck"
IFS=, read -ra chosen <<<"$phases"
for name in "${chosen[@]}"; do
  [[ ",$known," == *",$name,"* ]] || usage "--phases: no phase '$name'; there are $known"
done
case "$device" in cuda | cpu) ;; *) usage "--device: expected cuda or cpu, got ${device:-nothing}" ;; esac

root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$root"
export PYTHONPATH="$root:$root/python"
# where CUDA's tools lie when nobody has put them on PATH
[ -d /usr/local/cuda/bin ] && PATH="$PATH:/usr/local/cuda/bin"
if [ -z "$commit" ] && [ -d .git ] && command -v git >/dev/null; then
  commit=$(git rev-parse --short HEAD)$(git diff --quiet HEAD -- || echo " with changes")
fi
commit=${commit:-unknown}

deadline=530 # seconds; the rest of the nine minutes is for the table at the end
table=() failed=0 ran=0
note() { table+=("$(printf '%-22s %-8s %4ss  %s' "$1" "$2" "$3" "$4")"); }

# wanted NAME: whether a phase was asked for; there are two builds
wanted() {
  local name=$1
  [[ "$name" != build* ]] || name=build
  [ -z "$phases" ] || [[ ",$phases," == *",$name,"* ]]
}

# phase NAME SECONDS LOG COMMAND...: runs for at most SECONDS, or what is left, and notes how it ended
phase() {
  local name=$1 budget=$2 log=$3 begin=$SECONDS left=$((deadline - SECONDS)) code=0 lines
  shift 3
  wanted "$name" || return 0
  ran=1
  [ "$budget" -lt "$left" ] || budget=$left
  if [ "$budget" -lt 5 ]; then
    failed=1
    note "$name" "NOT RUN" 0 "no time left"
    return 1
  fi
  echo "== $name (at most $budget s): $*" | tee -a "$log"
  lines=$(wc -l <"$log")
  timeout -k 5 "$budget" "$@" >>"$log" 2>&1 || code=$?
  tail -n +"$((lines + 1))" "$log" | tail -n 4
  case $code in
    0) note "$name" ok $((SECONDS - begin)) "" ; return 0 ;;
    124 | 137) note "$name" TIMEOUT $((SECONDS - begin)) "after $budget s, see $(basename "$log")" ;;
    5) note "$name" FAILED $((SECONDS - begin)) "exit code 5 (pytest: no tests), see $(basename "$log")" ;;
    *) note "$name" FAILED $((SECONDS - begin)) "exit code $code, see $(basename "$log")" ;;
  esac
  failed=1
  return 1
}

# sanitizer TOOL PERCENT: takes that much of the time that is left; one that cannot watch this device has not
# run, which is told of and is no failure
sanitizer() {
  local log="$out/sanitizer.log" lines left=$((deadline - SECONDS))
  : >>"$log"
  wanted "$1" || return 0
  ran=1
  if ! command -v compute-sanitizer >/dev/null; then
    note "$1" "NOT RUN" 0 "compute-sanitizer is not on PATH"
    return
  fi
  lines=$(wc -l <"$log")
  # without PyTorch's cache, so that every tensor is an allocation of its own
  phase "$1" $((left * $2 / 100)) "$log" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool "$1" --error-exitcode 1 "$python" bench/sanitize.py && return
  if tail -n +"$((lines + 1))" "$log" | grep -q "Device not supported"; then
    unset 'table[-1]'
    failed=$before_sanitizer
    note "$1" "NOT RUN" 0 "compute-sanitizer does not support this device here"
  fi
}

about=$(timeout 180 "$python" - "$device" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version

import torch


def of(name):
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} missing"


names = ("triton", "transformers", "peft", "pytest", "pytest-timeout")
print(f"Python {sys.version.split()[0]}, torch {torch.__version__},", ", ".join(map(of, names)))
if sys.argv[1] == "cuda":
    if not torch.cuda.is_available():
        sys.exit("this torch sees no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    print(f"{torch.cuda.get_device_name()}, capability {major}.{minor}, CUDA {torch.version.cuda}")
    # 9.0 needs the features of sm_90a; the others are built as they are
    print("90a" if (major, minor) == (9, 0) else f"{major}{minor}")
PY
) || { echo "$python: no usable torch for device $device" >&2; exit 1; }
arch=""
if [ "$device" = cuda ]; then
  arch=$(tail -n 1 <<<"$about")
  about=$(head -n -1 <<<"$about")
  if command -v nvidia-smi >/dev/null; then
    about+=$'\n'$(nvidia-smi --query-gpu=driver_version,memory.total --format=csv,noheader || true)
  fi
fi
about="commit $commit"$'\n'"$about"
echo "$about"
wanted_logs() {
  ! wanted build || echo build.log
  ! wanted tests && ! wanted "kinds of adapters" && ! wanted runs && ! wanted "memory limit" || echo tests.log
  ! wanted "odd shapes" && ! wanted memcheck && ! wanted racecheck || echo sanitizer.log
  ! wanted pipeline || echo pipeline.log
  ! wanted launches || echo launches.txt
  ! wanted suite || echo suite.log suite.json suite.txt suite.png
}
for name in $(wanted_logs) summary.txt; do
  rm -f "${out:?}/$name"
done

if [ "$device" = cuda ]; then
  build=("$python" setup.py build_ext --inplace)
  if ! phase "build sm_$arch" 150 "$out/build.log" \
    env "CMAKE_ARGS=-DMLORA_WITH_CUDA=ON -DMLORA_CUDA_ARCHITECTURES=$arch" "${build[@]}"; then
    # Triton needs the operators' schemas only
    phase "build without CUDA" 60 "$out/build.log" \
      env CMAKE_ARGS=-DMLORA_WITH_CUDA=OFF "${build[@]}" || true
  fi
  phase "odd shapes" 90 "$out/sanitizer.log" "$python" bench/sanitize.py || true
  # in several processes where pytest-xdist is there: kernels compile beside each other, and a test that
  # breaks its CUDA context takes few others with it
  parallel=()
  ! "$python" -c "import xdist" 2>>"$out/tests.log" || parallel=(-n "$(nproc | awk '{print ($1 < 12) ? $1 : 12}')")
  # ends by itself before its limit, so that failures are told of; cuBLAS repeats its bits, for tests that
  # switch on PyTorch's deterministic mode
  phase tests 150 "$out/tests.log" env CUBLAS_WORKSPACE_CONFIG=:4096:8 "$python" -m pytest \
    -m gpu --timeout 120 --session-timeout 135 -rfEs "${parallel[@]}" --continue-on-collection-errors \
    tests/ext tests/cuda tests/mlora/model tests/mlora/files || true
  # tests that say nothing of a device, on this one: adapters of every kind, and whole runs
  phase "kinds of adapters" 90 "$out/tests.log" env CUBLAS_WORKSPACE_CONFIG=:4096:8 "$python" -m pytest --device cuda \
    -m "not nightly and not gpu" --session-timeout 80 -rfE "${parallel[@]}" tests/ext/test_{mixed_kinds,initialisations}.py \
    tests/ext/test_{heads,experts,target_parameters,lora_fa,row_norms,kinds_in_folders,quantized_bases}.py || true
  phase "runs" 90 "$out/tests.log" env MLORA_TESTS_DEVICE=cuda CUBLAS_WORKSPACE_CONFIG=:4096:8 "$python" -m pytest \
    -m "not nightly and not gpu" --session-timeout 80 -rfE "${parallel[@]}" \
    tests/mlora/run/test_{all_kinds,trained_heads,run_initialisations,quantized_runs}.py || true
  # apart from the others: it bounds its process's allocator, and needs what mlora itself needs
  phase "memory limit" 60 "$out/tests.log" "$python" -m pytest -m gpu --session-timeout 50 -rfEs -s \
    tests/mlora/planning/test_limit_gpu.py || true
  phase "pipeline" 60 "$out/pipeline.log" "$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    bench/pipeline_overlap.py --out "$out/pipeline" || true
  options=(linears adapters decoder ablation operators step --check)
else
  note "build" "NOT RUN" 0 "--device cpu takes what is built"
  note "memory limit" "NOT RUN" 0 "tests/mlora measures it on a CPU"
  phase "odd shapes" 60 "$out/sanitizer.log" "$python" bench/sanitize.py --device cpu || true
  phase tests 60 "$out/tests.log" "$python" -m pytest --timeout 60 tests/ext/test_segments.py || true
  phase "pipeline" 60 "$out/pipeline.log" "$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    bench/pipeline_overlap.py --device cpu --out "$out/pipeline" || true
  options=(linears adapters ablation --quick --rounds 1 --layouts balanced --threads 1)
fi

if [ "$device" = cuda ]; then
  phase "launches" 60 "$out/launches.txt" "$python" bench/gpu_launches.py || true
fi

# ends by itself before its limit, so that the last rows and the figure are written
left=$((deadline - SECONDS - 40))
[ "$left" -lt 150 ] || left=150
[ "$left" -gt 1 ] || left=1
phase suite $((left + 40)) "$out/suite.log" "$python" bench/suite.py "${options[@]}" --device "$device" \
  --time-limit "$left" --commit "$commit" --out "$out" || true
# what the suite printed stands in suite.txt, unless it did not get that far
[ ! -s "$out/suite.txt" ] || rm -f "$out/suite.log"

if [ "$device" = cuda ]; then
  # alone, since it compares clocks
  phase "tests of the suite" 60 "$out/tests.log" "$python" -m pytest -m gpu --session-timeout 50 -rfEs \
    tests/bench/test_suite_gpu.py || true
  before_sanitizer=$failed
  sanitizer memcheck 50
  before_sanitizer=$failed
  sanitizer racecheck 100
fi

{
  echo "$about"
  echo "bench/gpu.sh --device $device: $SECONDS s"
  printf '%s\n' "${table[@]}"
  [ ! -s "$out/suite.txt" ] || grep -E '^(seven linears|FAILED|skipped|out of time)' "$out/suite.txt" || true
} >"$out/summary.txt"
cat "$out/summary.txt"
[ "$ran" = 1 ] || { echo "bench/gpu.sh: none of these phases serves --device $device: $phases" >&2; exit 2; }
exit "$failed"
