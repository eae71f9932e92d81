// What the GPU can do at best: matrix products by cuBLAS and cublasLt called directly, with tensor cores and without. Prints
// one JSON list in the form of the suite's ceilings. Not yet run on a GPU.
//
//     frugal_bench_ceiling_cuda [size]

#include <cublas_v2.h>
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}
void check(cublasStatus_t status) {
  if (status != CUBLAS_STATUS_SUCCESS) throw std::runtime_error(cublasGetStatusString(status));
}

// A device allocation that ends with its scope.
struct Memory {
  explicit Memory(std::size_t bytes) { check(cudaMalloc(&data, bytes)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { cudaFree(data); }
  void* data = nullptr;
};

// Numbers, since zeros draw less power and let the clock run faster than a training does.
template <class T>
__global__ void fill(T* values, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x; i < count;
       i += std::size_t(gridDim.x) * blockDim.x)
    values[i] = T(float((i * 2654435761u) % 1024) / 512.0f - 1.0f);
}

struct Kind {
  const char* name;
  cudaDataType_t type;
  cublasComputeType_t compute;
};
// PEDANTIC keeps to the data type's own arithmetic: no tensor cores for fp32.
constexpr Kind kinds[] = {
    {"fp32", CUDA_R_32F, CUBLAS_COMPUTE_32F_PEDANTIC},
    {"tf32", CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32},
    {"bf16", CUDA_R_16BF, CUBLAS_COMPUTE_32F},
    {"fp16", CUDA_R_16F, CUBLAS_COMPUTE_32F},
    {"fp16-without-tensor-cores", CUDA_R_16F, CUBLAS_COMPUTE_32F_PEDANTIC},
};

// The best of some repetitions, each long enough for the clock of the events.
double seconds_each(const std::function<void()>& product) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin)), check(cudaEventCreate(&end));
  double best = 1e9;
  for (int repetition = 0; repetition < 6; ++repetition) {
    constexpr int count = 10;
    check(cudaEventRecord(begin));
    for (int i = 0; i < count; ++i) product();
    check(cudaEventRecord(end)), check(cudaEventSynchronize(end));
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end));
    best = std::min(best, double(milliseconds) / 1e3 / count);
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  return best;
}

struct Operands {
  Operands(const Kind& kind, int size)
      : bytes(kind.type == CUDA_R_32F ? 4 : 2), a(bytes * size * size), b(bytes * size * size), c(bytes * size * size) {
    const std::size_t count = std::size_t(size) * size;
    for (Memory* memory : {&a, &b}) {
      if (kind.type == CUDA_R_32F) fill<<<1024, 256>>>(static_cast<float*>(memory->data), count);
      else if (kind.type == CUDA_R_16F) fill<<<1024, 256>>>(static_cast<__half*>(memory->data), count);
      else fill<<<1024, 256>>>(static_cast<__nv_bfloat16*>(memory->data), count);
    }
    check(cudaGetLastError());
  }
  std::size_t bytes;
  Memory a, b, c;
};

double by_cublas(const Kind& kind, int size) {
  Operands on(kind, size);
  cublasHandle_t handle = nullptr;
  check(cublasCreate(&handle));
  const float one = 1, zero = 0;
  const double seconds = seconds_each([&] {
    check(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, size, size, size, &one, on.a.data, kind.type, size, on.b.data,
                       kind.type, size, &zero, on.c.data, kind.type, size, kind.compute, CUBLAS_GEMM_DEFAULT));
  });
  cublasDestroy(handle);
  return seconds;
}

double by_cublas_lt(const Kind& kind, int size) {
  Operands on(kind, size);
  constexpr std::size_t workspace_bytes = std::size_t{32} << 20;
  Memory workspace(workspace_bytes);
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t layout = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  check(cublasLtCreate(&handle));
  check(cublasLtMatmulDescCreate(&operation, kind.compute, CUDA_R_32F));
  check(cublasLtMatrixLayoutCreate(&layout, kind.type, size, size, size));
  check(cublasLtMatmulPreferenceCreate(&preference));
  check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                             sizeof workspace_bytes));
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  check(
      cublasLtMatmulAlgoGetHeuristic(handle, operation, layout, layout, layout, layout, preference, 1, &found, &count));
  if (count == 0) throw std::runtime_error("cublasLt knows no way to do it");
  const float one = 1, zero = 0;
  const double seconds = seconds_each([&] {
    check(cublasLtMatmul(handle, operation, &one, on.a.data, layout, on.b.data, layout, &zero, on.c.data, layout,
                         on.c.data, layout, &found.algo, workspace.data, workspace_bytes, nullptr));
  });
  cublasLtMatmulPreferenceDestroy(preference), cublasLtMatrixLayoutDestroy(layout);
  cublasLtMatmulDescDestroy(operation), cublasLtDestroy(handle);
  return seconds;
}

}  // namespace

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 8192;
  if (size <= 0) return std::fprintf(stderr, "usage: %s [size]\n", argv[0]), 2;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "skipped: no CUDA device\n");
    return 77;
  }
  const double flops = 2.0 * size * size * size;
  std::vector<std::string> lines;
  for (const Kind& kind : kinds)
    for (const auto& [library, measure] : {std::pair("cublas", &by_cublas), std::pair("cublaslt", &by_cublas_lt)}) try {
        const double value = flops / measure(kind, size);
        char line[200];
        std::snprintf(line, sizeof line, "{\"name\": \"%s/%s\", \"threads\": 0, \"value\": %.6g, \"unit\": \"FLOP/s\"}",
                      library, kind.name, value);
        lines.emplace_back(line);
      } catch (const std::exception& error) { std::fprintf(stderr, "%s %s: %s\n", library, kind.name, error.what()); }
  std::printf("[");
  for (std::size_t i = 0; i < lines.size(); ++i) std::printf("%s%s", i ? ",\n " : "", lines[i].c_str());
  std::printf("]\n");
}
