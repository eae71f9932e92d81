#pragma once

/// @file
/// Doubles for tests of training loops, in namespace frugal::testing: `FakeClock`, a clock that is set by hand,
/// `FailingStorage`, a disk that fails or stops on order, `MemoryOracle`, memory with a hidden limit, and `OverflowAt`,
/// a loss whose gradients are infinite at chosen steps.

#include <frugal/detail/testing_clock.hpp>
#include <frugal/detail/testing_memory.hpp>
#include <frugal/detail/testing_overflow.hpp>
#include <frugal/detail/testing_storage.hpp>
