#pragma once

/// @file
/// Doubles for tests of training loops, in namespace frugal::testing: `FakeClock`, a clock that is set by hand, and
/// `FailingStorage`, a disk that fails or stops on order.

#include <frugal/detail/testing_clock.hpp>
#include <frugal/detail/testing_storage.hpp>
