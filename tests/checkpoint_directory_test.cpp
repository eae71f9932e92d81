#include "support/catch.hpp"
#include "support/documents.hpp"
#include "support/temporary_directory.hpp"

#include <frugal/detail/checkpoint_directory.hpp>

#include <sys/wait.h>
#include <unistd.h>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using namespace frugal::detail;
using frugal::CheckpointInfo;
using frugal::Goal;
using frugal::Progress;
namespace fs = std::filesystem;

constexpr double no_number = std::numeric_limits<double>::quiet_NaN(),
                 infinity = std::numeric_limits<double>::infinity();

CheckpointInfo checkpoint(std::int64_t number, double metric, bool valid = true) {
  return {.path = checkpoint_path("", number),
          .progress = {.step = number, .metric = metric, .metric_step = number},
          .valid = valid};
}
std::vector<std::int64_t> numbers(const std::vector<fs::path>& paths) {
  std::vector<std::int64_t> out;
  for (const fs::path& path : paths) out.push_back(checkpoint_number(path).value());
  return out;
}
std::vector<std::int64_t> numbers(const std::vector<CheckpointInfo>& all) {
  std::vector<std::int64_t> out;
  for (const CheckpointInfo& c : all) out.push_back(checkpoint_number(c.path).value());
  return out;
}
using Numbers = std::vector<std::int64_t>;

void store_checkpoint(const fs::path& path, const Progress& progress) {
  OwnedDocument owned = small_document();
  write_progress(progress, owned.document.metadata);
  store(owned.document, path);
}

}  // namespace

static_assert(std::is_move_constructible_v<DirectoryLock> && !std::is_copy_constructible_v<DirectoryLock>);

TEST_CASE("progress comes back exactly", "[checkpoint directory]") {
  for (const double value : {0.1, -0.0, 1e308, 5e-324, 1.0 / 3, no_number, infinity, -infinity}) {
    const Progress before{.epoch = 1,
                          .micro_batch = 2,
                          .step = 3,
                          .skipped = 4,
                          .samples = INT64_MAX,
                          .loss = value,
                          .metric = -value,
                          .metric_step = -1};
    std::map<std::string, std::string> metadata;
    write_progress(before, metadata);
    const Progress after = read_progress(metadata);
    CHECK(after.epoch == 1);
    CHECK(after.micro_batch == 2);
    CHECK(after.step == 3);
    CHECK(after.skipped == 4);
    CHECK(after.samples == INT64_MAX);
    CHECK(after.metric_step == -1);
    CHECK(((std::isnan(value) && std::isnan(after.loss)) || after.loss == value));
    CHECK(std::signbit(after.loss) == std::signbit(value));
    CHECK(((std::isnan(value) && std::isnan(after.metric)) || after.metric == -value));
  }
}

TEST_CASE("metadata without a sound progress is no checkpoint", "[checkpoint directory]") {
  std::map<std::string, std::string> metadata;
  write_progress({}, metadata);
  for (const auto& [key, value] : std::map(metadata)) {
    auto without = metadata;
    without.erase(key);
    CHECK_THROWS_WITH(read_progress(without), ContainsSubstring(key));
    for (const char* wrong : {"", "x", "1x", " 1", "99999999999999999999e9999"}) {
      auto damaged = metadata;
      damaged[key] = wrong;
      CHECK_THROWS_AS(read_progress(damaged), DamagedFile);
    }
  }
}

TEST_CASE("names tell the number, and only our names do", "[checkpoint directory]") {
  CHECK(checkpoint_path("runs/a", 12) == "runs/a/checkpoint-00000012.safetensors");
  for (const std::int64_t number : {std::int64_t{1}, std::int64_t{99999999}, std::int64_t{100000000}, INT64_MAX})
    CHECK(checkpoint_number(checkpoint_path("x", number)) == number);
  for (const char* name :
       {"", "checkpoint-", "checkpoint-.safetensors", "checkpoint-12.safetensors", "checkpoint-00000000.safetensors",
        "checkpoint--0000001.safetensors", "checkpoint-00000012.safetensors.bak", "checkpoint-0000001x.safetensors",
        ".checkpoint-00000012.safetensors.77.1.tmp", "model.safetensors", "checkpoint-99999999999999999999.safetensors",
        "checkpoint-000000012.safetensors"})
    CHECK_FALSE(checkpoint_number(name));
}

TEST_CASE("the list holds our files alone, newest last, with what is wrong with them", "[checkpoint directory]") {
  const TemporaryDirectory folder;
  CHECK(list_checkpoints(folder / "none").empty());
  CHECK(list_checkpoints(folder.path()).empty());
  for (const std::int64_t number : {100000001, 2, 99999999})  // by name alone the first would be the oldest
    store_checkpoint(checkpoint_path(folder.path(), number), {.step = number, .metric = 0.5, .metric_step = 2});
  write_text(folder / "notes.txt", "mine");
  fs::create_directory(folder / "sub");
  store(small_document().document, checkpoint_path(folder.path(), 3));  // a sound file, but no checkpoint
  const std::string sound = read_text(checkpoint_path(folder.path(), 2));
  write_text(checkpoint_path(folder.path(), 4), sound.substr(0, sound.size() - 1));

  const auto all = list_checkpoints(folder.path());
  REQUIRE(numbers(all) == Numbers{2, 3, 4, 99999999, 100000001});
  CHECK(all[0].valid);
  CHECK(all[0].problem.empty());
  CHECK(all[0].bytes == sound.size());
  CHECK(all[0].progress.step == 2);
  CHECK(all[0].progress.metric == 0.5);
  CHECK_FALSE(all[1].valid);
  CHECK_THAT(all[1].problem, ContainsSubstring("no checkpoint"));
  CHECK_FALSE(all[2].valid);
  CHECK(all[2].progress.step == 0);
  CHECK(all[2].bytes == sound.size() - 1);
  CHECK_THAT(all[2].problem, ContainsSubstring("is damaged"));
  CHECK(all[4].progress.step == 100000001);
}

TEST_CASE("a directory that cannot be listed is an error, not an empty one", "[checkpoint directory]") {
  const TemporaryDirectory folder;
  write_text(folder / "file", "text");
  CHECK_THROWS_AS(checkpoint_files(folder / "file"), fs::filesystem_error);
}

TEST_CASE("the best: finite metrics of the weights in the file, the older of equal ones", "[checkpoint directory]") {
  std::vector<CheckpointInfo> all{checkpoint(1, 0.5),       checkpoint(2, 0.3),       checkpoint(3, 0.3),
                                  checkpoint(4, no_number), checkpoint(5, -infinity), checkpoint(6, 0.1, false),
                                  checkpoint(7, 0.2),       checkpoint(8, 0.9),       checkpoint(9, 0.1)};
  all[6].progress.metric_step = 6;  // of weights that are in no file
  all[8].metric_is_old = true;      // of buffers that are in no file
  CHECK(numbers(best_checkpoints(all, Goal::minimize)) == Numbers{2, 3, 1, 8});
  CHECK(numbers(best_checkpoints(all, Goal::maximize)) == Numbers{8, 1, 2, 3});
}

TEST_CASE("the newest and the best stay", "[checkpoint directory]") {
  const std::vector<CheckpointInfo> all{checkpoint(1, 0.5), checkpoint(2, 0.3), checkpoint(3, 0.4), checkpoint(4, 0.6),
                                        checkpoint(5, 0.7)};
  CHECK(numbers(superseded(all, {.keep_last = 2, .keep_best = 1})) == Numbers{3, 1});
  CHECK(numbers(superseded(all, {.keep_last = 1, .keep_best = 2})) == Numbers{4, 1});
  CHECK(numbers(superseded(all, {.keep_last = 1, .keep_best = 0})) == Numbers{4, 3, 2, 1});
  CHECK(numbers(superseded(all, {.keep_last = 0, .keep_best = 0})) == Numbers{4, 3, 2, 1});  // never the last one
  CHECK(numbers(superseded(all, {.keep_last = 1, .keep_best = 1, .goal = Goal::maximize})) == Numbers{4, 3, 2, 1});
  CHECK(superseded(all, {.keep_last = 5, .keep_best = 1}).empty());
  CHECK(superseded({}, {}).empty());
}

TEST_CASE("a damaged file counts for nothing, and goes when enough valid ones are newer", "[checkpoint directory]") {
  std::vector<CheckpointInfo> all{checkpoint(1, no_number), checkpoint(2, no_number), checkpoint(3, 0.1, false),
                                  checkpoint(4, no_number)};
  CHECK(numbers(superseded(all, {.keep_last = 2, .keep_best = 1})) == Numbers{1});
  all.push_back(checkpoint(5, no_number, false));
  CHECK(numbers(superseded(all, {.keep_last = 2, .keep_best = 1})) == Numbers{1});
  all.push_back(checkpoint(6, no_number));
  CHECK(numbers(superseded(all, {.keep_last = 2, .keep_best = 1})) == Numbers{3, 2, 1});
}

TEST_CASE("one directory has one writer, also inside a process", "[checkpoint directory]") {
  const TemporaryDirectory folder;
  const fs::path runs = folder / "runs/a";
  {
    DirectoryLock first(runs);  // makes the directory
    const DirectoryLock moved = std::move(first);
    CHECK_THROWS_WITH(DirectoryLock(runs), ContainsSubstring(runs.string()) &&
                                               ContainsSubstring("process " + std::to_string(::getpid())) &&
                                               ContainsSubstring("directory of its own"));
    const DirectoryLock other(folder / "runs/b");
  }
  const DirectoryLock again(runs);
  CHECK_THROWS_AS(DirectoryLock(runs), std::runtime_error);
}

TEST_CASE("the lock of another process counts, and ends with it, however it ends", "[checkpoint directory]") {
  const TemporaryDirectory folder;
  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const DirectoryLock lock(folder.path());
    if (::write(ready[1], "x", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char byte = 0;
  REQUIRE(::read(ready[0], &byte, 1) == 1);
  CHECK_THROWS_WITH(DirectoryLock(folder.path()), ContainsSubstring("process " + std::to_string(child)));
  ::kill(child, SIGKILL);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  const DirectoryLock lock(folder.path());
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_CASE("a lock that was given up is free, even while a forked child lives", "[checkpoint directory]") {
  const TemporaryDirectory folder;
  pid_t child = 0;
  {
    const DirectoryLock lock(folder.path());
    child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0)
      for (;;) ::pause();
  }
  CHECK_NOTHROW(DirectoryLock(folder.path()));
  ::kill(child, SIGKILL);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
}
