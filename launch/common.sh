# shellcheck shell=bash
# Shared by the scripts in launch/: places, messages, and the environment of an MPI job.
# Source it after `set -euo pipefail`; it changes nothing but variables and functions.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
CACHE="${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/rowshard"
REQUIREMENTS="$ROOT/launch/requirements.txt"
# shellcheck disable=SC2034  # used by the scripts that source this file
PROGRAM="$ROOT/build/release/rowshard"

say() { printf '%s\n' "rowshard: $*"; }
warn() { printf '%s\n' "rowshard: warning: $*" >&2; }

# Bad input or a missing prerequisite: one line, exit code 2.
die() {
  printf '%s\n' "rowshard: error: $*" >&2
  exit 2
}

have() { command -v "$1" >/dev/null 2>&1; }

# need_value FLAG COUNT: an option that takes a value must be followed by one.
need_value() { [ "$2" -ge 2 ] || die "$1 needs a value"; }

cores() { nproc 2>/dev/null || getconf _NPROCESSORS_ONLN; }

# The interpreter the virtual environment is made from. The system's one comes first: a python3
# on PATH may belong to another tool and vanish with it.
base_python() {
  local candidate
  for candidate in "${ROWSHARD_PYTHON:-}" /usr/bin/python3 python3; do
    if [ -z "$candidate" ] || ! have "$candidate"; then continue; fi
    if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' \
      2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

# The environment is named after what it holds and the interpreter it was made for, so that
# clones share it and a changed pin never reuses an old one. $1: interpreter.
venv_path() {
  local key
  key="$({ "$1" -c 'import sys; print(sys.version_info[:2], sys.executable)'
    cat "$REQUIREMENTS"; } | sha256sum | cut -c1-12)"
  printf '%s\n' "$CACHE/venv-$key"
}

# Complete only when the marker is there, which setup writes last.
venv_ready() { [ -f "$1/.complete" ] && [ -x "$1/bin/python" ]; }

# Path of the environment's interpreter, after launch/setup.
venv_python() {
  local python venv
  python="$(base_python)" || die "no Python >= 3.11 with venv; run launch/setup"
  venv="$(venv_path "$python")"
  venv_ready "$venv" || die "the Python environment is not set up; run launch/setup"
  printf '%s\n' "$venv/bin/python"
}

# Number of GPUs that this process may use, 0 without a driver.
gpu_count() {
  local listed=0
  if have nvidia-smi; then
    listed="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)"
  fi
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ] && [ "$listed" -gt 0 ]; then
    local visible
    visible="$(printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -cE '^[0-9A-Za-z]' || true)"
    [ "$visible" -lt "$listed" ] && listed="$visible"
  fi
  printf '%s\n' "$listed"
}

# Whether the built program has the cuda device; `rowshard --version` lists its devices.
program_has_cuda() { "$PROGRAM" --version 2>/dev/null | grep -qw cuda; }

# choose_device auto|cuda|host [RANKS]: sets DEVICE and RANKS; all GPUs if there are any, else two
# host ranks, so that the base really is sharded.
choose_device() {
  local wanted="$1" gpus
  RANKS="${2:-}"
  case "$wanted" in
    auto | cuda | host) ;;
    *) die "--device must be auto, cuda or host, not '$wanted'" ;;
  esac
  case "$RANKS" in
    "" | [1-9] | [1-9][0-9] | [1-9][0-9][0-9]) ;;
    *) die "--ranks must be a positive number, not '$RANKS'" ;;
  esac
  DEVICE=host
  gpus="$(gpu_count)"
  if [ "$wanted" = cuda ]; then
    program_has_cuda ||
      die "this build has no cuda device: nvcc >= 12.9 was not found when it was built"
    [ "$gpus" -gt 0 ] || die "--device cuda: no GPU is visible (nvidia-smi -L lists none)"
    DEVICE=cuda
  elif [ "$wanted" = auto ] && [ "$gpus" -gt 0 ]; then
    if program_has_cuda; then
      DEVICE=cuda
    else
      warn "$gpus GPUs, but this build has no cuda device (nvcc >= 12.9 not found); using the host"
    fi
  fi
  if [ -z "$RANKS" ]; then
    RANKS=2
    [ "$DEVICE" = host ] || RANKS="$gpus"
  fi
}

# The rank count was chosen by us, not by a resource manager: let Open MPI start as many ranks as
# asked, leave threads unbound, and share the cores so that BLAS threads do not fight.
# $1: ranks on this host.
mpi_environment() {
  local threads=$(($(cores) / $1))
  [ "$threads" -ge 1 ] || threads=1
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
  export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-$threads}"
  export OMPI_MCA_rmaps_base_oversubscribe=1
  export OMPI_MCA_hwloc_base_binding_policy=none
  # In a container root is often the only user there is; Open MPI asks twice to be sure.
  if [ "$(id -u)" -eq 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
}

# run_ranks N PROGRAM ARGS...: the program on N ranks of this host, with its exit code. The program
# says in one line what is wrong with its input; mpirun's own paragraph after it is left out.
run_ranks() {
  local ranks="$1" status=0
  shift
  (
    mpi_environment "$ranks"
    export OMPI_MCA_orte_execute_quiet="${OMPI_MCA_orte_execute_quiet:-1}"
    exec mpirun -np "$ranks" "$@"
  ) || status=$?
  if [ "$status" -gt 128 ]; then
    warn "a rank died: exit code $status (OMPI_MCA_orte_execute_quiet=0 shows what mpirun says)"
  fi
  return "$status"
}
