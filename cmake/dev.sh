#!/usr/bin/env bash
# Sets a machine up and runs what a developer runs. `bash cmake/dev.sh help` lists the verbs.
#
# Every step is one line on the terminal. What the tools say goes to build/logs/, and an error shows the end of its log.
# Every verb is safe to run again: what is there already is used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly torch_version=${FRUGAL_TORCH_VERSION:-2.13.0}
readonly cuda_torch_version=${FRUGAL_CUDA_TORCH_VERSION:-2.14.1}
readonly clang_format_version=23.1.5
readonly logs=build/logs
export PIP_DISABLE_PIP_VERSION_CHECK=1

usage() {
  cat <<'END'
usage: bash cmake/dev.sh VERB [ARGUMENTS]

  setup          installs what is missing (packages, LibTorch into .venv) and nothing that is there
  demo [ARGS]    setup, builds the demo optimised, and trains on Fashion-MNIST; ARGS go to it (try: demo --help)
  test           setup, builds everything, runs every test
  clang          the same with the newest clang (16 or newer) that is installed
  cuda-check     builds all of it against a CUDA build of LibTorch with nvcc and cuBLAS; runs what runs here
  bench [ARGS]   the benchmark suite, with its report; ARGS go to it (try: bench --quick, bench --list, bench --help)
  bench-peers    sets up the Python peers that the suite compares with (torch, Accelerate, Lightning) in .venv-peers
  gpu            device tests and the suite on a GPU, within 10 minutes; everything lands in build/gpu-report
  figures        measures again what README.md states, and writes it there
  format         formats the sources;  format-check only says which are not formatted
  help           this text

LibTorch (2.11 or newer) is taken from TORCH_ROOT, CMAKE_PREFIX_PATH or the active Python, and nothing is downloaded
then; else .venv is made with it. These environment variables choose another one for .venv:
  FRUGAL_TORCH_VERSION   the version of the torch package, 2.13.0 unless set
  FRUGAL_TORCH_INDEX     the package index to take it from, such as one that has CPU-only builds
END
}

say() { printf '%s\n' "$*"; }

fail() {
  printf 'error: %s\n' "$@" >&2
  exit 1
}

# step TEXT LOG COMMAND...: runs the command with its output in build/logs/LOG.log. (A function that runs as a step says
# `|| return` itself: bash ignores `set -e` there.)
step() {
  local text=$1 log=$logs/$2.log started=$SECONDS
  shift 2
  mkdir -p "$logs"
  printf '%s ... ' "$text"
  if "$@" >"$log" 2>&1 </dev/null; then
    say "done ($((SECONDS - started)) s)"
  else
    say "failed"
    tail -n 40 "$log" | sed 's/^/  | /' >&2
    fail "$text: failed; everything it said is in $log"
  fi
}

has() { command -v "$1" >/dev/null 2>&1; }

# ---- packages --------------------------------------------------------------------------------------------------------

# need PACKAGE LOSS COMMAND...: notes the package as missing when the command fails. Without a LOSS it is a must.
need() {
  local package=$1 loss=$2
  shift 2
  if "$@"; then return; fi
  missing+=("$package")
  if [ -n "$loss" ]; then losses+=("$package: $loss"); else required+=("$package"); fi
}

# Debian and Ubuntu use the same names.
check_needs() {   # KIND: demo, test or none
  need g++ "" has c++
  need cmake "" has cmake
  need ninja-build "" has ninja
  need python3-venv "" can_make_environments
  if [ "$1" != none ]; then need zlib1g-dev "" has_header zlib.h; fi
  if [ "$1" = bench ]; then
    need libbenchmark-dev "the micro-benchmarks" has_header benchmark/benchmark.h
    need dataset-fashion-mnist "the time to target on images" has_package dataset-fashion-mnist
    need jargon-text "the time to target on text" has_package jargon-text
  fi
  if [ "$1" = demo ]; then
    need libcli11-dev "" has_header CLI/CLI.hpp
    need dataset-fashion-mnist "the data: give the demo a folder with the files of Fashion-MNIST, --data FOLDER" \
      has_package dataset-fashion-mnist
  elif [ "$1" = test ]; then
    need catch2 "" has_header catch2/catch.hpp catch2/catch_all.hpp
    need libcli11-dev "the demo, which is not built" has_header CLI/CLI.hpp
    need valgrind "the check that counts instructions, which is skipped" has valgrind
    need ccache "the compiler cache: building again takes as long as the first time" has ccache
    need mold "the fast linker" has mold
  fi
}

has_header() {   # any of them
  local header
  for header in "$@"; do
    if echo "#include <$header>" | c++ -std=c++20 -E -x c++ - >/dev/null 2>&1; then return; fi
  done
  return 1
}
has_package() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
can_make_environments() { uses_own_torch || python3 -c 'import ensurepip, venv' >/dev/null 2>&1; }
can_be_root() { [ "$(id -u)" -eq 0 ] || { has sudo && { sudo -n true 2>/dev/null || [ -t 0 ]; }; }; }

install_packages() {   # KIND
  local missing=() required=() losses=() as_root=() loss
  check_needs "$1"
  [ "${#missing[@]}" -gt 0 ] || return 0

  if has apt-get && can_be_root; then
    if [ "$(id -u)" -ne 0 ]; then
      as_root=(sudo)
      sudo true   # asks for the password here, before the output goes to a log
    fi
    step "Reading the package lists" apt-update "${as_root[@]}" apt-get update
    step "Installing ${missing[*]}" apt-install "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y --no-install-recommends "${missing[@]}"
    return
  fi
  say "Not installed here: ${missing[*]}"
  say "  as root: apt-get install ${missing[*]}"
  for loss in "${losses[@]}"; do say "  goes on without $loss"; done
  [ "${#required[@]}" -eq 0 ] || fail "needed, and neither root nor sudo is at hand to install it: ${required[*]}"
}

# ---- LibTorch --------------------------------------------------------------------------------------------------------

# What CMake would find, `root|version|cuda version`, from the same module. Empty: nothing.
found_torch() {
  local answer
  answer=$(cmake -P cmake/FindLibTorch.cmake 2>&1) || return 0
  say "$answer" | tail -n 1
}

# A LibTorch other than .venv's will be used, so that Python need not make an environment.
uses_own_torch() {
  local found
  has cmake || return 1
  [ -z "${FRUGAL_TORCH_VERSION:-}" ] || return 1
  found=$(found_torch)
  [ -n "$found" ] && [[ $found != "$PWD/.venv/"* ]]
}

# make_environment FOLDER PACKAGE...: installs into a Python environment. One that was interrupted is made again; pip's own
# errors leave it as it was.
make_environment() {
  local folder=$1 mark=$1/unfinished status=0
  shift
  if [ ! -e "$folder/bin/pip" ] || [ -e "$mark" ]; then
    python3 -m venv --clear "$folder" || return
  fi
  touch "$mark"
  "$folder/bin/pip" install "$@" || status=$?
  rm -f "$mark"
  return "$status"
}

torch_of() { echo "$1"/lib/python3*/site-packages/torch; }

environment_has_torch() {   # FOLDER VERSION
  [ ! -e "$1/unfinished" ] && grep -qs "^__version__ = '$2\(+.*\)\?'" "$(torch_of "$1")/version.py"
}

provide_torch() {
  local found root version cuda kind
  if [ -n "${FRUGAL_TORCH_ROOT:-}${TORCH_ROOT:-}" ] || { [ -z "${FRUGAL_TORCH_VERSION:-}" ] && [ ! -e .venv/unfinished ]; }; then
    found=$(found_torch)
    if [ -n "$found" ]; then
      IFS='|' read -r root version cuda <<<"$found"
      if [ -n "$cuda" ]; then kind="CUDA $cuda"; else kind=CPU; fi
      say "Using LibTorch $version ($kind) at $root"
      return
    fi
    [ -z "${FRUGAL_TORCH_ROOT:-}${TORCH_ROOT:-}" ] || fail "no usable LibTorch at ${FRUGAL_TORCH_ROOT:-$TORCH_ROOT}:" \
      "$(cmake -P cmake/FindLibTorch.cmake 2>&1 | grep '(.*TORCH_ROOT)' || true)"
  fi
  if ! environment_has_torch .venv "$torch_version"; then
    step "Installing LibTorch $torch_version into .venv (minutes, up to 6 GB)" torch \
      make_environment .venv "torch==$torch_version" ${FRUGAL_TORCH_INDEX:+--index-url "$FRUGAL_TORCH_INDEX"}
  fi
  say "Using LibTorch $torch_version in .venv"
  TORCH_ROOT=$PWD/$(torch_of .venv)
  export TORCH_ROOT
}

# ---- verbs -----------------------------------------------------------------------------------------------------------

setup() {   # KIND
  install_packages "$1"
  provide_torch
}

# build PRESET FOLDER [CMAKE OPTIONS]
build() {
  local preset=$1 folder=$2
  shift 2
  step "Configuring $folder" "configure-${folder//\//-}" cmake --preset "$preset" -B "$folder" "$@"
  step "Building $folder" "build-${folder//\//-}" cmake --build "$folder" -j 2
}

# Runs the tests in FOLDER and ends with ctest's own summary.
run_tests() {
  local log=$logs/test-${1//\//-}.log failed=0
  printf 'Testing %s ... ' "$1"
  ctest --test-dir "$1" -j 2 --output-on-failure --no-tests=error --timeout 900 >"$log" 2>&1 </dev/null || failed=1
  if [ "$failed" -eq 0 ]; then say "done"; else say "failed; everything is in $log"; fi
  if [ "$failed" -ne 0 ]; then sed '/tests passed,/,$d' "$log" | grep -vE ' Passed |^ *Start ' | tail -n 100 | sed 's/^/  | /'; fi
  sed -n '/tests passed,/,$p' "$log"
  return "$failed"
}

demo() {
  setup demo
  step "Configuring build/demo" configure-demo cmake --preset release -B build/demo -DFRUGAL_TESTS=OFF -DFRUGAL_PCH=OFF
  step "Building the demo" build-demo cmake --build build/demo -j 2 --target example_10_trainer
  build/demo/examples/example_10_trainer "$@"
}

test_all() {
  setup test
  build dev build/dev
  run_tests build/dev
}

# What README.md states, measured again.
figures() {
  setup demo
  setup test
  step "Configuring build/figures" configure-figures cmake --preset release -B build/figures -DFRUGAL_PCH=OFF
  step "Building the demo and the counting programs" build-figures cmake --build build/figures -j 2 --target \
    frugal_overhead_fake frugal_overhead_torch example_10_trainer
  step "Measuring (minutes: it trains)" figures python3 cmake/figures.py build/figures/tests/overhead/frugal_overhead_fake \
    build/figures/tests/overhead/frugal_overhead_torch build/figures/examples/example_10_trainer
  say "README.md has the figures"
}

# ---- the benchmark suite ---------------------------------------------------------------------------------------------

# The Python environments of the suite. Versions are pinned: a ratio against a peer says which peer.
readonly accelerate_version=1.15.0 lightning_version=2.6.6 matplotlib_version=3.11.2

bench_peers() {
  local found version
  setup bench
  found=$(found_torch)
  version=$(cut -d'|' -f2 <<<"$found")
  [ -n "$version" ] || fail "no LibTorch was found; run \`bash cmake/dev.sh setup\` first"
  step "Installing torch $version, Accelerate, Lightning and matplotlib into .venv-peers (minutes, up to 6 GB)" peers \
    make_environment .venv-peers "torch==${version%%+*}" "accelerate==$accelerate_version" "lightning==$lightning_version" \
    "matplotlib==$matplotlib_version" ${FRUGAL_TORCH_INDEX:+--index-url "$FRUGAL_TORCH_INDEX"}
  say "The suite compares with them from now on"
}

# A Python that can draw: the peers' environment, else a small one for the report alone. Without either: tables only.
report_python() {
  local candidate
  for candidate in .venv-peers/bin/python .venv-report/bin/python python3; do
    if "$candidate" -c 'import matplotlib' >/dev/null 2>&1; then echo "$candidate" && return; fi
  done
  if make_environment .venv-report "matplotlib==$matplotlib_version" >"$logs/report.log" 2>&1; then
    echo .venv-report/bin/python
  else
    echo python3
  fi
}

has_peers() { [ -x .venv-peers/bin/python ] && [ ! -e .venv-peers/unfinished ]; }

# bench_into FOLDER BUILD NAME [ARGUMENTS]: measures, and writes NAME.json, NAME.html and NAME.md.
bench_into() {
  local folder=$1 built=$2 name=$3 status=0
  shift 3
  mkdir -p "$folder"
  local peers=() result=$folder/$name.json shown=() previous= argument
  for argument in "$@"; do   # where the result goes is no part of what was measured
    case $argument in
      --out) ;;
      --out=*) result=${argument#--out=} ;;
      *) if [ "$previous" = --out ]; then result=$argument; else shown+=("$argument"); fi ;;
    esac
    previous=$argument
  done
  if has_peers; then peers=(--peers "$PWD/.venv-peers/bin/python"); fi
  python3 benchmarks/suite.py --programs "$built/benchmarks" --scratch "$built" --out "$folder/$name.json" "${peers[@]}" \
    --command "bash cmake/dev.sh bench${shown[*]:+ ${shown[*]}}" "$@" || status=$?
  if [ "$status" -ne 0 ] && [ "$status" -ne 130 ]; then return "$status"; fi   # an interrupted one has its report
  "$(report_python)" benchmarks/report.py "$result" --out "$(dirname "$result")"
  return "$status"
}

bench() {
  local name=cpu-full argument
  for argument in "$@"; do
    case $argument in
      --list) if has_peers; then exec python3 benchmarks/suite.py --peers .venv-peers/bin/python "$@"; else exec python3 benchmarks/suite.py "$@"; fi ;;
      --compare | -h | --help) exec python3 benchmarks/suite.py "$@" ;;
      --quick) name=${name/full/quick} ;;
      --only | --only=*) name=${name/-*/-only} ;;
      cuda* | --device=cuda*) name=${name/cpu/cuda} ;;
    esac
  done
  setup bench
  step "Configuring build/bench" configure-bench cmake --preset release -B build/bench -DFRUGAL_BENCHMARKS=ON -DFRUGAL_TESTS=OFF \
    -DFRUGAL_EXAMPLES=OFF
  step "Building the benchmarks" build-bench cmake --build build/bench -j 2
  [ -x .venv-peers/bin/python ] || say "Without the Python peers; \`bash cmake/dev.sh bench-peers\` sets them up"
  bench_into build/bench-results build/bench "$name" "$@"
}

# Needs no network where LibTorch, nvcc and a compiler are: nothing is installed but what is missing.
gpu() {
  local report=build/gpu-report status=0
  mkdir -p "$report" "$logs"
  has ninja || export CMAKE_GENERATOR="Unix Makefiles"
  provide_cuda_torch
  provide_nvcc
  step "Configuring build/gpu" configure-gpu cmake -S . -B build/gpu -DCMAKE_BUILD_TYPE=Release -DFRUGAL_CUDA=ON \
    "-DFRUGAL_NVCC=$CUDACXX" -DFRUGAL_GPU_ONLY=ON -DFRUGAL_EXAMPLES=OFF -DFRUGAL_BENCHMARKS=ON
  step "Building device tests and benchmarks" build-gpu cmake --build build/gpu -j "$(nproc)"
  build/gpu/tests/frugal_gpu_tests >"$report/tests.txt" 2>&1 || status=$?
  cat "$report/tests.txt"
  if [ "$status" -eq 77 ]; then fail "no CUDA device here; what was built is in build/gpu"; fi
  bench_into "$report" build/gpu cuda --device cuda --threads 1 --minutes "${FRUGAL_GPU_MINUTES:-5}"
  say "Tests, JSON and report: $report"
  return "$status"
}

newest_clang() {
  local version
  for version in 22 21 20 19 18 17 16; do
    if has "clang++-$version"; then command -v "clang++-$version" && return; fi
  done
  if has clang++ && [ "$(clang++ -dumpversion | cut -d. -f1)" -ge 16 ]; then command -v clang++; fi
}

clang() {
  local compiler
  compiler=$(newest_clang)
  [ -n "$compiler" ] || fail "no clang 16 or newer was found; install one (Debian 12: apt-get install clang-16)"
  setup test
  build dev build/clang "-DCMAKE_CXX_COMPILER=$compiler"
  run_tests build/clang
}

sources() { find include tests examples benchmarks -name '*.hpp' -o -name '*.cpp' -o -name '*.cu' | sort; }

clang_format() {
  local environment=.venv-format
  install_packages none
  if [ "$("$environment/bin/clang-format" --version 2>/dev/null | grep -o '[0-9.]*$')" != "$clang_format_version" ]; then
    step "Installing clang-format $clang_format_version into $environment" clang-format \
      make_environment "$environment" "clang-format==$clang_format_version"
  fi
  sources | xargs -r "$environment/bin/clang-format" "$@"
}

format_check() {
  mkdir -p "$logs"
  clang_format --version >/dev/null
  if clang_format --dry-run -Werror >"$logs/format.log" 2>&1; then
    say "Format: $(sources | wc -l) files, all as clang-format $clang_format_version writes them"
  else
    grep -o '^[^ :]*:[0-9]*' "$logs/format.log" | cut -d: -f1 | sort | uniq -c >&2
    fail "these files are not formatted (lines to change, file); \`bash cmake/dev.sh format\` does it"
  fi
}

# A CUDA build of LibTorch: the one at hand, else an environment of its own.
provide_cuda_torch() {
  local found
  found=$(found_torch)
  if [ -n "$found" ] && [ -n "${found##*|}" ]; then
    TORCH_ROOT=${found%%|*}
  else
    if ! environment_has_torch .venv-cuda "$cuda_torch_version"; then
      step "Installing a CUDA build of LibTorch $cuda_torch_version into .venv-cuda (minutes, 6 GB)" torch-cuda \
        make_environment .venv-cuda "torch==$cuda_torch_version"
    fi
    TORCH_ROOT=$PWD/$(torch_of .venv-cuda)
  fi
  export TORCH_ROOT
  unset FRUGAL_TORCH_ROOT
  found=$(found_torch)
  torch_cuda=${found##*|}
  [ -n "$torch_cuda" ] || fail "$TORCH_ROOT is no CUDA build of LibTorch; set TORCH_ROOT to one, or" \
    "FRUGAL_CUDA_TORCH_VERSION to a version whose package is one"
  say "Using LibTorch of CUDA $torch_cuda at $TORCH_ROOT"
}

nvcc_release() { "$1" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p'; }

# An nvcc of the same CUDA major version: the machine's, else the packages of the same version.
provide_nvcc() {
  local candidate folder major=${torch_cuda%%.*}
  for candidate in "${CUDACXX:-}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc \
    .venv-cuda/lib/python3*/site-packages/nvidia/cu"$major"/bin/nvcc; do
    if [ -x "$candidate" ] && [ "$(nvcc_release "$candidate")" = "$major" ]; then
      CUDACXX=$(realpath "$candidate")
      export CUDACXX
      say "Using nvcc at $candidate"
      return
    fi
  done
  [ "$major" -ge 13 ] || fail "no nvcc of CUDA $major was found; install the CUDA toolkit $torch_cuda, or set CUDACXX"
  step "Installing nvcc $torch_cuda into .venv-cuda" nvcc make_environment .venv-cuda \
    "nvidia-cuda-nvcc==$torch_cuda.*" "nvidia-cuda-crt==$torch_cuda.*" "nvidia-nvvm==$torch_cuda.*" \
    "nvidia-cuda-cccl==$torch_cuda.*" "nvidia-cuda-runtime==$torch_cuda.*"
  folder=$(echo "$PWD"/.venv-cuda/lib/python3*/site-packages/nvidia/cu"$major")
  ln -sfn lib "$folder/lib64"   # where nvcc looks
  export CUDACXX=$folder/bin/nvcc
}

cuda_check() {
  install_packages test
  provide_cuda_torch
  provide_nvcc
  build dev build/cuda -DFRUGAL_CUDA=ON "-DFRUGAL_NVCC=$CUDACXX" -DFRUGAL_SOURCE_CHECKS=OFF
  run_tests build/cuda
}

main() {
  local verb=${1:-help}
  if [ $# -gt 0 ]; then shift; fi
  case $verb in
    help | -h | --help) usage ;;
    setup) setup test ;;
    demo) demo "$@" ;;
    test) test_all ;;
    clang) clang ;;
    cuda-check) cuda_check ;;
    bench) bench "$@" ;;
    bench-peers) bench_peers ;;
    gpu) gpu ;;
    figures) figures ;;
    format) clang_format -i ;;
    format-check) format_check ;;
    *)
      usage >&2
      fail "no such verb: $verb"
      ;;
  esac
}

main "$@"
