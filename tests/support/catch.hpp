#pragma once

/// @file
/// The one way into Catch2 for every test: 2.13 and 3.x look alike behind it. LibTorch's logging header and Catch2 both
/// define CHECK and its relatives, so LibTorch comes first where the program has it, and loses the names.

#if __has_include(<torch/torch.h>)
#include <torch/torch.h>
#endif

#undef CHECK
#undef CHECK_EQ
#undef CHECK_NE
#undef CHECK_LE
#undef CHECK_LT
#undef CHECK_GE
#undef CHECK_GT
#undef CHECK_NOTNULL
#undef DCHECK
#undef DCHECK_EQ
#undef DCHECK_NE
#undef DCHECK_LE
#undef DCHECK_LT
#undef DCHECK_GE
#undef DCHECK_GT
#undef DCHECK_NOTNULL

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#define FRUGAL_CATCH2_MAJOR 3
using Catch::Approx;
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>
#define FRUGAL_CATCH2_MAJOR 2
inline auto ContainsSubstring(const std::string& text) { return Catch::Matchers::Contains(text); }
#endif
