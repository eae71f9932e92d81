#include "support/catch.hpp"

#include <frugal/preemption.hpp>

#include <csignal>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include <sys/wait.h>
#include <unistd.h>

using namespace frugal;

namespace {

int seen_by_previous = 0;
void previous_handler(int) { ++seen_by_previous; }

// Puts a handler of the user's in place for one test.
struct UserHandler {
  struct sigaction before{};
  UserHandler() {
    seen_by_previous = 0;
    struct sigaction mine{};
    mine.sa_handler = &previous_handler;
    sigaction(SIGUSR1, &mine, &before);
  }
  ~UserHandler() { sigaction(SIGUSR1, &before, nullptr); }
};
Preemption on_usr1() { return Preemption({.signals = {SIGUSR1}}); }

// What a child process that runs `body` ended with.
int status_of(auto body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

}  // namespace

TEST_CASE("a signal asks to stop, and the previous handler comes back") {
  UserHandler user;
  {
    Preemption preemption = on_usr1();
    CHECK(!preemption.requested());
    raise(SIGUSR1);
    CHECK(preemption.requested());
    CHECK(seen_by_previous == 0);
  }
  raise(SIGUSR1);
  CHECK(seen_by_previous == 1);
}

TEST_CASE("a moved preemption goes on hearing; the one it came from is deaf") {
  UserHandler user;
  std::optional<Preemption> first(on_usr1());
  Preemption moved(std::move(*first));
  first.reset();
  raise(SIGUSR1);
  CHECK(moved.requested());
  CHECK(seen_by_previous == 0);
}

TEST_CASE("owners may go in any order") {
  UserHandler user;
  std::optional<Preemption> one(on_usr1()), two(on_usr1());
  one.reset();
  raise(SIGUSR1);
  CHECK(two->requested());
  two.reset();
  raise(SIGUSR1);
  CHECK(seen_by_previous == 1);
}

TEST_CASE("a preemption hears only what comes after it was made") {
  UserHandler user;
  Preemption early = on_usr1();
  raise(SIGUSR1);
  Preemption late = on_usr1();
  CHECK(early.requested());
  CHECK(!late.requested());
}

TEST_CASE("a signal wakes its own owners alone") {
  UserHandler user;
  CHECK(status_of([] {
          Preemption reclaim({.signals = {SIGTERM, SIGINT}}), notice = on_usr1();
          raise(SIGTERM);
          if (!reclaim.requested() || notice.requested()) _exit(1);
          raise(SIGUSR1);  // the first one for its owner: nobody dies of it
          if (!notice.requested()) _exit(1);
          notice.reset();
          if (!reclaim.requested()) _exit(1);
          raise(SIGUSR1);
        }) == 0);
  const int status = status_of([] {
    Preemption reclaim({.signals = {SIGTERM, SIGINT}}), notice = on_usr1();
    raise(SIGUSR1), raise(SIGTERM);
    raise(SIGINT);  // the second one of an owner, whichever it is
  });
  REQUIRE(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGINT);
  CHECK(status_of([] {
          std::optional<Preemption> both(Preemption({.signals = {SIGTERM, SIGUSR1}}));
          Preemption reclaim({.signals = {SIGTERM}});
          both.reset();
          Preemption notice = on_usr1();
          raise(SIGTERM), raise(SIGUSR1);  // these two have no owner in common any more
        }) == 0);
}

TEST_CASE("what an owner heard goes with it: the others count their own signals") {
  CHECK(status_of([] {
          Preemption interrupt({.signals = {SIGINT}}), reclaim({.signals = {SIGTERM}});
          { Preemption both({.signals = {SIGINT, SIGTERM}}); }
          raise(SIGINT), raise(SIGTERM);
          if (!interrupt.requested() || !reclaim.requested()) _exit(1);
        }) == 0);
  CHECK(status_of([] {
          Preemption reclaim({.signals = {SIGTERM}});
          {
            Preemption both({.signals = {SIGINT, SIGTERM}});
            raise(SIGINT);
          }
          if (reclaim.requested()) _exit(1);
          raise(SIGTERM);
          if (!reclaim.requested()) _exit(1);
        }) == 0);
  CHECK(status_of([] {
          std::optional<Preemption> first(Preemption({.signals = {SIGTERM}}));
          raise(SIGTERM);
          Preemption next({.signals = {SIGTERM}});
          first.reset();
          if (next.requested()) _exit(1);
          raise(SIGTERM);
          if (!next.requested()) _exit(1);
        }) == 0);
}

TEST_CASE("reset() forgets for one owner: the second signal of another one ends the process") {
  const int same = status_of([] {
    Preemption outer({.signals = {SIGINT}}), inner({.signals = {SIGTERM, SIGINT}});
    raise(SIGINT);
    outer.reset();
    if (outer.requested() || !inner.requested()) _exit(1);
    raise(SIGINT);
  });
  REQUIRE(WIFSIGNALED(same));
  CHECK(WTERMSIG(same) == SIGINT);
  const int other = status_of([] {
    Preemption all({.signals = {SIGTERM, SIGINT, SIGUSR1}}), notice = on_usr1();
    raise(SIGUSR1);
    notice.reset();
    raise(SIGTERM);
  });
  REQUIRE(WIFSIGNALED(other));
  CHECK(WTERMSIG(other) == SIGTERM);
}

TEST_CASE("a preemption that was moved from is an error to ask") {
  Preemption first = on_usr1(), second = std::move(first);
  CHECK_THROWS_WITH(first.request(), ContainsSubstring("was moved from"));
  CHECK_THROWS_WITH(first.requested(), ContainsSubstring("was moved from"));
  CHECK_THROWS_AS(first.reset(), std::logic_error);
  first = on_usr1();
  first.request();
  CHECK(first.requested());
  CHECK(!second.requested());
}

TEST_CASE("a handler that was installed in between is left alone") {
  UserHandler user;
  {
    Preemption preemption = on_usr1();
    std::signal(SIGUSR1, &previous_handler);
  }
  raise(SIGUSR1);
  CHECK(seen_by_previous == 1);
}

TEST_CASE("a second signal ends the process at once") {
  const int status = status_of([] {
    Preemption preemption({.signals = {SIGTERM}});
    raise(SIGTERM);
    raise(SIGTERM);
  });
  REQUIRE(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGTERM);
  CHECK(WIFEXITED(status_of([] {
    Preemption preemption({.signals = {SIGTERM}});
    raise(SIGTERM);
    preemption.reset();  // a new run: the next signal is a first one
    raise(SIGTERM);
  })));
}

TEST_CASE("request asks from any thread, and without signals nothing is handled") {
  UserHandler user;
  Preemption preemption({.signals = {}});
  std::thread([&] { preemption.request(); }).join();
  CHECK(preemption.requested());
  preemption.reset();
  raise(SIGUSR1);
  CHECK(!preemption.requested());
  CHECK(seen_by_previous == 1);
}

TEST_CASE("a signal that is named twice is handled once") {
  UserHandler user;
  {
    Preemption preemption({.signals = {SIGUSR1, SIGUSR1}});
    raise(SIGUSR1);
    CHECK(preemption.requested());
  }
  raise(SIGUSR1);
  CHECK(seen_by_previous == 1);
}

TEST_CASE("a signal that cannot be handled is an error, and none is") {
  UserHandler user;
  CHECK_THROWS_AS(Preemption({.signals = {SIGUSR1, 0}}), std::invalid_argument);
  CHECK_THROWS_AS(Preemption({.signals = {SIGUSR1, SIGKILL}}), std::invalid_argument);
  raise(SIGUSR1);
  CHECK(seen_by_previous == 1);
}
