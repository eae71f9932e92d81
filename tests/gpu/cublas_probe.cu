#include "cublas_probe.hpp"

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <vector>

static_assert(__cplusplus >= 202002L, "nvcc must be given C++20 as the host compiler is");

namespace {

constexpr int kSize = 64;
constexpr int kElements = kSize * kSize;

// Small integers, so that every product and sum is exact in any precision and the two results must be equal.
__global__ void fill(float* matrix, int modulus) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < kElements) matrix[i] = static_cast<float>(i % modulus);
}

// An allocation on the device that ends with its scope.
struct DeviceMatrix {
  DeviceMatrix() { cudaMalloc(&data, kElements * sizeof(float)); }
  ~DeviceMatrix() { cudaFree(data); }
  DeviceMatrix(const DeviceMatrix&) = delete;
  DeviceMatrix& operator=(const DeviceMatrix&) = delete;
  float* data = nullptr;
};

float expected(int row, int column) {  // column-major, as cuBLAS has it
  float sum = 0;
  for (int k = 0; k < kSize; ++k) {
    sum += static_cast<float>((k * kSize + row) % 7) * static_cast<float>((column * kSize + k) % 5);
  }
  return sum;
}

}  // namespace

std::string cublas_probe(std::string& device) {
  cudaDeviceProp properties{};
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, 0); error != cudaSuccess) {
    return std::string("cudaGetDeviceProperties: ") + cudaGetErrorString(error);
  }
  device = properties.name;

  DeviceMatrix a, b, c;
  fill<<<(kElements + 255) / 256, 256>>>(a.data, 7);
  fill<<<(kElements + 255) / 256, 256>>>(b.data, 5);

  cublasHandle_t handle = nullptr;
  if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS) return "cublasCreate failed";
  const float one = 1, zero = 0;
  const cublasStatus_t status = cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, kSize, kSize, kSize, &one, a.data, kSize,
                                            b.data, kSize, &zero, c.data, kSize);
  cublasDestroy(handle);
  if (status != CUBLAS_STATUS_SUCCESS) return std::string("cublasSgemm: ") + cublasGetStatusString(status);

  std::vector<float> result(kElements);
  if (const cudaError_t error = cudaMemcpy(result.data(), c.data, kElements * sizeof(float), cudaMemcpyDeviceToHost);
      error != cudaSuccess) {
    return std::string("cudaMemcpy: ") + cudaGetErrorString(error);
  }
  for (int column = 0; column < kSize; ++column) {
    for (int row = 0; row < kSize; ++row) {
      if (result[column * kSize + row] != expected(row, column)) {
        return "element (" + std::to_string(row) + ", " + std::to_string(column) + ") is " +
               std::to_string(result[column * kSize + row]) + ", not " + std::to_string(expected(row, column));
      }
    }
  }
  return {};
}
