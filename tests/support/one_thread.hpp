#pragma once

#include <ATen/Parallel.h>

/// LibTorch computes in one thread while it lives: for tensors that are too small for threads, which cost much where the
/// cores are busy, and for what is counted in this thread alone.
struct OneThread {
  int before = at::get_num_threads();
  OneThread() { at::set_num_threads(1); }
  OneThread(const OneThread&) = delete;
  ~OneThread() { at::set_num_threads(before); }
};
