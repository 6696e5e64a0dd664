// Hopper's own instructions (sm_90a), one thin function each. Kernels hold no other assembly.
//
// Names follow the PTX manual; what is said here is what the kernels rely on.
//   mbarrier        a phase ends when all expected arrivals have come and all expected bytes have
//                   landed; a wait names the parity of the phase it waits for, and the phase
//                   before the first counts as ended (so a producer starts with parity 1)
//   TMA             a box of a tensor to or from shared memory; what lies outside the tensor reads
//                   as zero, counts as bytes, and is not written
//   128B swizzle    in rows of 128 bytes, 16-byte chunk c of row r lies at chunk c ^ (r % 8)
//   wgmma           four warps multiply [64, 32] by [kCols, 32]ᵀ codes; runs until waited for
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

// A build for several architectures makes the bodies of such kernels for sm_90a only. The others'
// are never launched: fp8/gemm_path.h asks for compute capability 9.0.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ROWSHARD_HOPPER 1
#else
#define ROWSHARD_HOPPER 0
#endif

namespace rowshard::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier ----------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
/// Makes initialised barriers visible to TMA; a block barrier must follow.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// One arrival, and `bytes` more to land before the phase ends.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
/// A barrier of `threads` threads of the block; id 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- copies ------------------------------------------------------------------------------------

/// A box at (column, row) to shared memory; its bytes are reported to `barrier`.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* from, int column, int row,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(from), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
/// `bytes` in a row; both ends and the size in multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
/// A box from shared memory; joined to the calling thread's next group.
__device__ __forceinline__ void tma_store(const CUtensorMap* to, uint32_t from, int column,
                                          int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(to),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Until all but the calling thread's last `kPending` groups have read their shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// Until all groups of the calling thread are in global memory.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/// Ordinary writes to shared memory before this are seen by TMA and wgmma after a barrier.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- kernels in a row -------------------------------------------------------------------------

/// Lets a kernel that asks for it start on multiprocessors that are done with this one.
__device__ __forceinline__ void start_kernel_behind() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
/// Until the kernel before this one on the stream is done, if this one was started beside it.
__device__ __forceinline__ void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- registers and shared memory ---------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
/// Keeps what is made of `value` behind this point.
__device__ __forceinline__ void pin(uint32_t& value) {
  asm volatile("" : "+r"(value));
}
/// The blocks of the grid, read here and not kept in a register.
__device__ __forceinline__ int read_grid() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}
__device__ __forceinline__ float load_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
/// Four 8×8 matrices of 16-bit elements. Lane l names row l % 8 of matrix l / 8; register i of lane
/// l holds row l / 4, columns 2 (l % 4) and the next of matrix i (transposed: their exchange).
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&to)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row_address));
}
__device__ __forceinline__ void stmatrix(uint32_t row_address, uint32_t a, uint32_t b, uint32_t c,
                                         uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(a),
      "r"(b), "r"(c), "r"(d)
      : "memory");
}
/// Byte i of the result is byte (selector >> 4 i) & 7 of the eight in low, high.
__device__ __forceinline__ uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}

// ---- wgmma -------------------------------------------------------------------------------------

/// Describes codes in shared memory: rows of 128 bytes, 128B swizzle, 1024-byte aligned groups of
/// eight rows one after another. 32 codes further along a row: + 2.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kHigh = uint64_t{0x40000000u | (1024 >> 4)} << 32;  // swizzle, group stride
  return kHigh | ((address >> 4) | 1u << 16);
}
/// Before the first wgmma that reads registers written since the last one.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Ties `d` to this point, so that no use of it moves before the wait in front.
template <int kSize>
__device__ __forceinline__ void hold(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    asm volatile("" : "+f"(d[i])::"memory");
  }
}

// d [64, kCols] = a · bᵀ (+ d when accumulate), e4m3. Thread t of the four warps holds, for column
// group j of 8:
//   d[4j], d[4j+1]    row 16 (t / 32) + (t % 32) / 4, columns 8j + 2 (t % 4) and the next
//   d[4j+2], d[4j+3]  eight rows below
#define ROWSHARD_NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ROWSHARD_NAMES32                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ROWSHARD_NAMES64                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ROWSHARD_NAMES96                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define ROWSHARD_BIND4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ROWSHARD_BIND16(i) \
  ROWSHARD_BIND4(i), ROWSHARD_BIND4(i + 4), ROWSHARD_BIND4(i + 8), ROWSHARD_BIND4(i + 12)
#define ROWSHARD_BIND32(i) ROWSHARD_BIND16(i), ROWSHARD_BIND16(i + 16)
#define ROWSHARD_BIND64(i) ROWSHARD_BIND32(i), ROWSHARD_BIND32(i + 32)
#define ROWSHARD_BIND96(i) ROWSHARD_BIND64(i), ROWSHARD_BIND32(i + 64)

__device__ __forceinline__ void wgmma(float (&d)[16], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {" ROWSHARD_NAMES16
      "}, %16, %17, add, 1, 1;\n}\n"
      : ROWSHARD_BIND16(0)
      : "l"(a), "l"(b), "r"(int{accumulate}));
}
__device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" ROWSHARD_NAMES32
      "}, %32, %33, add, 1, 1;\n}\n"
      : ROWSHARD_BIND32(0)
      : "l"(a), "l"(b), "r"(int{accumulate}));
}
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" ROWSHARD_NAMES64
      "}, %64, %65, add, 1, 1;\n}\n"
      : ROWSHARD_BIND64(0)
      : "l"(a), "l"(b), "r"(int{accumulate}));
}
__device__ __forceinline__ void wgmma(float (&d)[96], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 {" ROWSHARD_NAMES96
      "}, %96, %97, add, 1, 1;\n}\n"
      : ROWSHARD_BIND96(0)
      : "l"(a), "l"(b), "r"(int{accumulate}));
}
#undef ROWSHARD_NAMES16
#undef ROWSHARD_NAMES32
#undef ROWSHARD_NAMES64
#undef ROWSHARD_NAMES96
#undef ROWSHARD_BIND4
#undef ROWSHARD_BIND16
#undef ROWSHARD_BIND32
#undef ROWSHARD_BIND64
#undef ROWSHARD_BIND96

}  // namespace rowshard::ptx
