#pragma once

#include <string>

/// One cuBLAS matrix product on device 0, held against the same product on the host: shows that the toolkit's compiler,
/// its libraries and LibTorch's own CUDA runtime work together in one process. Linked where FRUGAL_CUDA_TOOLKIT is
/// defined.
/// @return an empty string when both agree, else what went wrong. `device` gets the name of the device.
std::string cublas_probe(std::string& device);
