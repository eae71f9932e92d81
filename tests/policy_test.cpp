#include "support/catch.hpp"

#include <frugal/policy.hpp>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

using namespace frugal;

TEST_CASE("a weight may have any arithmetic type") {
  const Weighted of_int{1.5, 3};
  const Weighted of_int64{1.5, std::int64_t{3}};
  const Weighted of_size{1.5, std::size_t{3}};
  const Weighted of_float{1.5, 3.0f};
  CHECK(of_int.weight == 3.0);
  CHECK(of_int64.weight == 3.0);
  CHECK(of_size.weight == 3.0);
  CHECK(of_float.weight == 3.0);
  CHECK(of_int.loss == 1.5);
}

TEST_CASE("the first metric is the watched one") {
  const Metrics metrics{{"loss", 0.5}, {"accuracy", 0.9}};
  CHECK(metrics.watched() == 0.5);
  CHECK(metrics.find("accuracy") == 0.9);
  CHECK(!metrics.find("recall"));
  CHECK(metrics.size() == 2);
  CHECK(Metrics(0.25).watched() == 0.25);
  CHECK_THROWS_AS(Metrics(std::initializer_list<std::pair<std::string, double>>{}), std::invalid_argument);
}

TEST_CASE("readings are collected at the first look and once") {
  int collected = 0;
  const Readings readings([&](Readings& out) {
    ++collected;
    out.write("rate", 0.1);
    out.write("norm", 2.0);
  });
  CHECK(collected == 0);
  CHECK(readings.find("rate") == 0.1);
  CHECK(!readings.find("scale"));
  CHECK(readings.size() == 2);
  CHECK(collected == 1);
}

TEST_CASE("a reading that is written twice is replaced") {
  Readings readings;
  readings.write("rate", 0.1);
  readings.write("rate", 0.2);
  CHECK(readings.size() == 1);
  CHECK(readings.find("rate") == 0.2);
}

TEST_CASE("results have words") {
  static_assert(std::string_view(to_string(StepResult::accumulated)) == "accumulated");
  static_assert(std::string_view(to_string(StepResult::applied)) == "applied");
  static_assert(std::string_view(to_string(StepResult::skipped)) == "skipped");
}

TEST_CASE("a progress starts with nothing known") {
  const Progress at;
  CHECK(at.loss != at.loss);
  CHECK(at.metric != at.metric);
  CHECK(at.metric_step == -1);
}
