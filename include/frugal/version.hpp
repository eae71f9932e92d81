#pragma once

/// @file
/// The version of frugal, for the preprocessor and for the build: the only place that states it.
/// The interface is `inline namespace v0` until version 1; what changed is in CHANGELOG.md.

#define FRUGAL_VERSION_MAJOR 0
#define FRUGAL_VERSION_MINOR 1
#define FRUGAL_VERSION_PATCH 0
