#include "support/catch.hpp"
#include "support/fakes.hpp"

#include <frugal/loss_scaler.hpp>

using frugal::LossScaler;
using frugal::LossScalerOptions;

TEST_CASE("LossScaler: starts at init_scale and grows after growth_interval applied windows in a row") {
  LossScaler scaler({.init_scale = 8, .growth = 2, .growth_interval = 3});
  scaler.applied();
  scaler.applied();
  CHECK(scaler.scale() == 8);
  scaler.applied();
  CHECK(scaler.scale() == 16);
  scaler.applied();
  scaler.applied();
  scaler.overflowed();  // starts the count anew
  CHECK(scaler.scale() == 8);
  scaler.applied();
  scaler.applied();
  CHECK(scaler.scale() == 8);
  scaler.applied();
  CHECK(scaler.scale() == 16);
  CHECK(scaler.skipped() == 1);
}

TEST_CASE("LossScaler: the scale never leaves its bounds, 166 overflows do not take it to zero") {
  LossScaler scaler({.max_consecutive_skips = 1000});
  for (int i = 0; i < 166; ++i) scaler.overflowed();
  CHECK(scaler.scale() == 1);
  CHECK(std::isfinite(1 / scaler.scale()));

  LossScaler growing({.init_scale = 8, .growth_interval = 1, .max_scale = 20});
  for (int i = 0; i < 10; ++i) growing.applied();
  CHECK(growing.scale() == 20);
}

TEST_CASE("LossScaler: hysteresis overflows in a row are needed for each backoff") {
  LossScaler scaler({.init_scale = 64, .hysteresis = 2});
  scaler.overflowed();
  CHECK(scaler.scale() == 64);
  scaler.applied();  // not in a row
  scaler.overflowed();
  CHECK(scaler.scale() == 64);
  scaler.overflowed();
  CHECK(scaler.scale() == 32);
  scaler.overflowed();
  CHECK(scaler.scale() == 32);
  scaler.overflowed();
  CHECK(scaler.scale() == 16);
  CHECK(scaler.skipped() == 5);
}

TEST_CASE("LossScaler: max_consecutive_skips in a row are an error that names the step and what to try") {
  LossScaler scaler({.max_consecutive_skips = 3});
  scaler.applied();
  scaler.overflowed();
  scaler.applied();  // not in a row
  scaler.overflowed();
  CHECK_FALSE(scaler.exhausted());
  scaler.overflowed();
  CHECK(scaler.exhausted());
  CHECK_THROWS_WITH(scaler.overflowed(), ContainsSubstring("step 6") && ContainsSubstring("overflow number 3") &&
                                             ContainsSubstring("learning rate") && ContainsSubstring("Bf16"));
  CHECK(scaler.skipped() == 4);
}

TEST_CASE("LossScaler: options that contradict each other are an error") {
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS_WITH(LossScaler({.init_scale = 0.5}), ContainsSubstring("init_scale is 0.5"));
  CHECK_THROWS(LossScaler({.min_scale = 0}));
  CHECK_THROWS(LossScaler({.init_scale = 4, .max_scale = 2}));
  CHECK_THROWS(LossScaler({.init_scale = nan}));
  CHECK_THROWS(LossScaler({.max_scale = infinity}));
  CHECK_THROWS_WITH(LossScaler({.growth = 0.5}), ContainsSubstring("growth"));
  CHECK_THROWS_WITH(LossScaler({.backoff = 0}), ContainsSubstring("backoff"));
  CHECK_THROWS(LossScaler({.backoff = 2}));
  CHECK_THROWS_WITH(LossScaler({.growth_interval = 0}), ContainsSubstring("growth_interval"));
  CHECK_THROWS(LossScaler({.hysteresis = 0}));
  CHECK_THROWS(LossScaler({.max_consecutive_skips = 0}));
  CHECK_NOTHROW(LossScaler({.growth = 1, .backoff = 1}));
}

TEST_CASE("LossScaler: a reloaded scaler goes on exactly as the saved one") {
  const LossScalerOptions options{
      .init_scale = 1024, .growth_interval = 3, .hysteresis = 2, .max_consecutive_skips = 4};
  LossScaler saved(options);
  saved.applied();
  saved.applied();
  saved.overflowed();
  saved.overflowed();
  saved.overflowed();
  fakes::Archive archive;
  saved.save(archive);
  LossScaler loaded(options);
  loaded.load(archive);
  CHECK(loaded.scale() == 512);
  CHECK(loaded.skipped() == 3);
  CHECK_THROWS_WITH(loaded.overflowed(), ContainsSubstring("step 6"));
  CHECK_THROWS_WITH(saved.overflowed(), ContainsSubstring("step 6"));
  for (int i = 0; i < 3; ++i) saved.applied(), loaded.applied();
  CHECK(loaded.scale() == saved.scale());

  loaded.reset();
  CHECK(loaded.scale() == 1024);
  CHECK(loaded.skipped() == 0);

  LossScaler bounded({.init_scale = 8, .max_scale = 16});
  bounded.load(archive);
  CHECK(bounded.scale() == 16);
}
