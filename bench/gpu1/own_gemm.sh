#!/usr/bin/env bash
# Builds own_gemm.cu (see there) into BUILD/own_gemm, on the libraries of a built tree.
#
#   bench/gpu1/own_gemm.sh [BUILD]     BUILD: build/release
set -euo pipefail
cd "$(dirname "$0")/../.."
build="${1:-build/release}"
cuda="$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")"
nvcc -std=c++20 -O3 -DROWSHARD_CUDA=1 -gencode=arch=compute_90a,code=sm_90a -Isrc \
  --expt-relaxed-constexpr -diag-suppress 20012,20013,20014,20015 -o "$build/own_gemm" \
  bench/gpu1/own_gemm.cu "$build"/librowshard_{fp8,core}.a -L"$cuda/lib" -L"$cuda/lib64" \
  -lcublasLt -lcublas -lopenblas -lgomp
echo "$build/own_gemm"
