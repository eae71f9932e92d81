#include "support/policies.hpp"
#include "support/tensor_archive.hpp"

#include <frugal/policy.hpp>
#include <frugal/trainer.hpp>

#include <type_traits>
#include <utility>
#include <vector>

using namespace frugal;
using registry::Loop;
using registry::Sample;

template <class Policy>
concept Renewable = requires(Policy& policy) { policy.reset(); };

// What every policy promises, over the registry.

TEMPLATE_LIST_TEST_CASE("a policy names its role and can be moved", "", registry::All) {
  STATIC_REQUIRE(TestType::role == Sample<TestType>::role);
  STATIC_REQUIRE(std::is_nothrow_move_constructible_v<TestType>);
  STATIC_REQUIRE(std::is_move_assignable_v<TestType>);
}

TEMPLATE_LIST_TEST_CASE("a policy has both halves of its state, or none", "", registry::All) {
  STATIC_REQUIRE(frugal::detail::state_fits<TestType>);
  STATIC_REQUIRE(frugal::detail::readings_fit<TestType>);
  if constexpr (Stateful<TestType>) STATIC_REQUIRE(Renewable<TestType>);
}

TEMPLATE_LIST_TEST_CASE("the state of a policy comes back, before and after it is used again", "", registry::All) {
  if constexpr (Stateful<TestType>) {
    torch::manual_seed(1);
    Loop loop;
    TestType used = Sample<TestType>::make();
    Sample<TestType>::use(used, loop);
    TensorArchive written;
    used.save(written);

    TestType continued = Sample<TestType>::make();
    continued.load(written);
    TensorArchive again;
    continued.save(again);
    CHECK(again == written);

    loop.optimizer.zero_grad();
    if (TestType::role == Role::stopping) return;  // it has said stop
    TensorArchive one, other;
    Loop copy;
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < loop.model->parameters().size(); ++i)
      copy.model->parameters()[i].copy_(loop.model->parameters()[i]);
    for (std::size_t i = 0; i < loop.optimizer.param_groups().size(); ++i)
      copy.optimizer.param_groups()[i].options().set_lr(loop.optimizer.param_groups()[i].options().get_lr());
    at::AutoGradMode with_gradients(true);
    Sample<TestType>::use(used, loop);
    Sample<TestType>::use(continued, copy);
    used.save(one);
    continued.save(other);
    CHECK(one == other);
  }
}

TEMPLATE_LIST_TEST_CASE("reset makes a policy as new for the next run", "", registry::All) {
  if constexpr (Stateful<TestType>) {
    if (TestType::role == Role::schedule) return;  // keeps the base rates: schedule_test.cpp
    Loop loop;
    TestType fresh = Sample<TestType>::make(), used = Sample<TestType>::make();
    Sample<TestType>::use(used, loop);
    TensorArchive as_new, after_use, after_reset;
    fresh.save(as_new);
    used.save(after_use);
    used.reset();
    used.save(after_reset);
    CHECK(after_reset == as_new);
  }
}

TEMPLATE_LIST_TEST_CASE("a moved policy goes on where it was", "", registry::All) {
  if constexpr (Stateful<TestType>) {
    Loop loop;
    TestType used = Sample<TestType>::make();
    Sample<TestType>::use(used, loop);
    TensorArchive before, after;
    used.save(before);
    TestType moved(std::move(used));
    moved.save(after);
    CHECK(after == before);
    TestType assigned = Sample<TestType>::make();
    assigned = std::move(moved);
    TensorArchive once_more;
    assigned.save(once_more);
    CHECK(once_more == before);
  }
}

TEMPLATE_LIST_TEST_CASE("a policy works in a Trainer, wherever it stands", "", registry::All) {
  Loop loop;
  auto mean_loss = [](torch::nn::Linear& model, const torch::Tensor& batch) { return model(batch).square().mean(); };
  Trainer first{loop.model, loop.optimizer, mean_loss, Sample<TestType>::make(), OnStep{[](const Progress&) {}}};
  Trainer last{loop.model, loop.optimizer, mean_loss, OnStep{[](const Progress&) {}}, Sample<TestType>::make()};
  const std::vector<torch::Tensor> batches(3, torch::ones({4, 3}));
  CHECK(first.fit(batches, [] { return 1.0; }).progress.micro_batch == 0);
  CHECK(last.fit(batches, [] { return 1.0; }).progress.epoch == 1);
}

TEMPLATE_LIST_TEST_CASE("the readings of a policy are numbers with names", "", registry::All) {
  if constexpr (frugal::detail::HasReadings<TestType>) {
    Loop loop;
    TestType policy = Sample<TestType>::make();
    Readings before, after;
    policy.readings(before);  // never used: must not throw
    Sample<TestType>::use(policy, loop);
    policy.readings(after);
    for (const auto& [name, value] : after) CHECK(!name.empty());
  }
}
