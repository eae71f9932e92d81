#include "support/catch.hpp"

#include <frugal/detail/background_writer.hpp>

#include <pthread.h>
#include <algorithm>
#include <atomic>
#include <csignal>
#include <exception>
#include <filesystem>
#include <future>
#include <iterator>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using frugal::detail::BackgroundWriter;

auto threads_of_this_process() { return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}); }

}  // namespace

static_assert(std::is_nothrow_move_constructible_v<BackgroundWriter> &&
              std::is_nothrow_move_assignable_v<BackgroundWriter>);

TEST_CASE("without a job there is no thread", "[background writer]") {
  const auto before = threads_of_this_process();
  BackgroundWriter writer;
  writer.wait();
  CHECK_FALSE(writer.take_error());
  CHECK_FALSE(writer.busy());
  BackgroundWriter moved = std::move(writer);
  moved.wait();
  CHECK(threads_of_this_process() == before);
}

TEST_CASE("all jobs run on one thread that is not the caller's, in order", "[background writer]") {
  std::vector<int> order;  // written by the writer, read after wait(): a race that a sanitizer would see
  std::vector<std::thread::id> threads;
  BackgroundWriter writer;
  for (int i = 0; i < 100; ++i)
    writer.submit([&, i] {
      order.push_back(i);
      threads.push_back(std::this_thread::get_id());
    });
  writer.wait();
  REQUIRE(order.size() == 100);
  CHECK(std::ranges::is_sorted(order));
  CHECK(std::ranges::count(threads, threads.front()) == 100);
  CHECK(threads.front() != std::this_thread::get_id());
}

TEST_CASE("submit returns while the job runs, and waits for the one before", "[background writer]") {
  std::promise<void> gate;
  std::atomic<int> running = 0, most = 0, done = 0;
  const auto job = [&] {
    most = std::max(most.load(), ++running);
    std::this_thread::yield();
    --running, ++done;
  };
  BackgroundWriter writer;
  writer.submit([&] { gate.get_future().wait(), job(); });
  CHECK(writer.busy());
  CHECK(done == 0);
  gate.set_value();
  for (int i = 0; i < 50; ++i) {
    writer.submit(job);
    CHECK(done >= i + 1);
  }
  writer.wait();
  CHECK_FALSE(writer.busy());
  CHECK(done == 51);
  CHECK(most == 1);
}

TEST_CASE("an error surfaces once, at the next wait or submit", "[background writer]") {
  BackgroundWriter writer;
  const auto fail = [] { throw std::runtime_error("disk full"); };
  bool ran = false;

  writer.submit(fail);
  CHECK_THROWS_WITH(writer.wait(), "disk full");
  CHECK_NOTHROW(writer.wait());

  writer.submit(fail);
  CHECK_THROWS_WITH(writer.submit([&] { ran = true; }), "disk full");
  CHECK_NOTHROW(writer.wait());
  CHECK_FALSE(ran);  // the caller was told that nothing was taken

  writer.submit(fail);
  CHECK(writer.take_error());
  CHECK_FALSE(writer.take_error());

  writer.submit([&] { ran = true; });
  writer.wait();
  CHECK(ran);
}

TEST_CASE("what a job holds is released when it has ended", "[background writer]") {
  const auto held = std::make_shared<int>(0);
  BackgroundWriter writer;
  writer.submit([held] {});
  writer.wait();
  CHECK(held.use_count() == 1);
  writer.submit([held] { throw std::runtime_error("x"); });
  CHECK(writer.take_error());
  CHECK(held.use_count() == 1);
}

TEST_CASE("the end of the writer finishes its job, and swallows its error", "[background writer]") {
  std::atomic<bool> done = false;
  {
    BackgroundWriter writer;
    std::promise<void> started;
    writer.submit([&] { started.set_value(), std::this_thread::yield(), done = true; });
    started.get_future().wait();
  }
  CHECK(done);
  done = false;
  {
    BackgroundWriter().submit([&] { done = true; });
  }
  CHECK(done);
  BackgroundWriter().submit([] { throw std::runtime_error("nobody hears this"); });
}

TEST_CASE("a writer can be moved in the middle of a job", "[background writer]") {
  std::promise<void> gate;
  std::atomic<int> done = 0;
  BackgroundWriter first;
  first.submit([&] { gate.get_future().wait(), ++done; });
  BackgroundWriter second = std::move(first);
  CHECK(second.busy());
  gate.set_value();
  second.wait();
  CHECK(done == 1);

  BackgroundWriter third;
  third.submit([&] { ++done; });
  second.submit([&] { throw std::runtime_error("from the second"); });
  third = std::move(second);  // what was in flight in the third has ended
  CHECK(done == 2);
  CHECK_THROWS_WITH(third.wait(), "from the second");
}

TEST_CASE("signals go to the threads of the program", "[background writer]") {
  sigset_t before, blocked, after;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &before);
  BackgroundWriter writer;
  writer.submit([&] { ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked); });
  writer.wait();
  ::pthread_sigmask(SIG_SETMASK, nullptr, &after);
  CHECK(sigismember(&blocked, SIGTERM) == 1);
  CHECK(sigismember(&blocked, SIGINT) == 1);
  CHECK(sigismember(&after, SIGTERM) == sigismember(&before, SIGTERM));
}
