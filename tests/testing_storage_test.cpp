#include "support/catch.hpp"
#include "support/documents.hpp"
#include "support/temporary_directory.hpp"

#include <frugal/detail/background_writer.hpp>
#include <frugal/detail/checkpoint_directory.hpp>
#include <frugal/detail/testing_storage.hpp>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <system_error>
#include <utility>

namespace {

using frugal::detail::BackgroundWriter;
using frugal::testing::FailingStorage;
using frugal::testing::FailingStorageOptions;
namespace fs = std::filesystem;

// One, two, three: three writes of 3, 3 and 5 bytes.
void put(FailingStorage& storage, const fs::path& target) {
  auto file = storage.create(target);
  for (const char* text : {"one", "two", "three"}) file.write(bytes_of(std::string(text)));
  file.commit();
}
void put_document(FailingStorage& storage, const fs::path& target) {
  auto file = storage.create(target);
  frugal::detail::write_document(small_document().document, file);
  file.commit();
}
bool fails(FailingStorageOptions options, const std::string& verb) {
  const TemporaryDirectory folder;
  write_text(folder / "a", "old");
  FailingStorage storage(options);
  try {
    put(storage, folder / "a");
    storage.remove(folder / "none");
  } catch (const std::system_error& error) {
    CHECK(error.code().value() == ENOSPC);
    CHECK_THAT(error.what(), ContainsSubstring("injected failure of " + verb));
    CHECK(storage.failures() == 1);
    CHECK(folder.size() == 1);
    CHECK(read_text(folder / "a") == (verb == "remove" ? "onetwothree" : "old"));
    return true;
  }
  CHECK(storage.failures() == 0);
  CHECK(read_text(folder / "a") == "onetwothree");
  return false;
}

}  // namespace

TEST_CASE("unarmed, it is LocalFiles that count", "[testing]") {
  const TemporaryDirectory folder;
  FailingStorage storage;
  put(storage, folder / "a");
  put(storage, folder / "b");
  storage.remove(folder / "a");
  CHECK(folder.size() == 1);
  CHECK(storage.creates() == 2);
  CHECK(storage.writes() == 6);
  CHECK(storage.bytes() == 22);
  CHECK(storage.commits() == 2);
  CHECK(storage.removes() == 1);
  CHECK(storage.failures() == 0);
}

TEST_CASE("each verb fails where it was told to, and the old file stays", "[testing]") {
  CHECK(fails({.at_create = 1}, "create"));
  for (const int at : {1, 2, 3}) CHECK(fails({.at_write = at}, "write"));
  for (const int at : {1, 3, 4, 11}) CHECK(fails({.at_byte = at}, "write"));
  CHECK(fails({.at_commit = 1}, "commit"));
  CHECK(fails({.at_remove = 1}, "remove"));
  CHECK_FALSE(fails({}, ""));
  CHECK_FALSE(fails({.at_create = 2, .at_write = 4, .at_byte = 12, .at_commit = 2, .at_remove = 2}, ""));
}

TEST_CASE("bytes before the failing one are written", "[testing]") {
  const TemporaryDirectory folder;
  FailingStorage storage({.at_byte = 5});
  auto file = storage.create(folder / "a");
  file.write(bytes_of(std::string("one")));
  CHECK_THROWS_AS(file.write(bytes_of(std::string("two"))), std::system_error);
  file.write(bytes_of(std::string("!")));
  file.commit();
  CHECK(read_text(folder / "a") == "onet!");
}

TEST_CASE("failures go on for as many calls as asked for, and can be armed anew", "[testing]") {
  const TemporaryDirectory folder;
  FailingStorage storage({.at_commit = 2, .times = 2});
  put(storage, folder / "1");
  CHECK_THROWS_AS(put(storage, folder / "2"), std::system_error);
  CHECK_THROWS_AS(put(storage, folder / "3"), std::system_error);
  put(storage, folder / "4");
  CHECK(storage.failures() == 2);
  FailingStorage copy = storage;
  copy.arm({.at_create = 1, .times = std::numeric_limits<std::int64_t>::max()});
  CHECK(storage.creates() == 0);
  for (int i = 0; i < 20; ++i) CHECK_THROWS_AS(put(storage, folder / "5"), std::system_error);
  copy.arm({});
  put(storage, folder / "5");
  CHECK(folder.size() == 3);
}

TEST_CASE("a held storage stops the writer and nobody else", "[testing]") {
  const TemporaryDirectory folder;
  FailingStorage storage;
  BackgroundWriter writer;
  storage.hold();
  writer.submit([copy = storage, &folder]() mutable { put(copy, folder / "a"); });
  storage.wait_until_held();
  CHECK(writer.busy());
  CHECK(folder.size() == 0);
  storage.release();
  writer.wait();
  CHECK(read_text(folder / "a") == "onetwothree");
}

TEST_CASE("whatever call fails, in both ways of writing, the checkpoint before stays valid and alone", "[testing]") {
  const TemporaryDirectory folder;
  const fs::path first = folder / "checkpoint-00000001.safetensors",
                 second = folder / "checkpoint-00000002.safetensors";
  FailingStorage storage;
  put_document(storage, first);
  const std::string before = read_text(first);
  const std::int64_t writes = storage.writes(), bytes = storage.bytes();
  REQUIRE(writes >= 6);
  REQUIRE(bytes == static_cast<std::int64_t>(before.size()));

  int failures = 0;
  const auto attempt = [&](FailingStorageOptions options) {
    for (const bool background : {false, true})
      for (const fs::path& target : {first, second}) {
        storage.arm(options);
        BackgroundWriter writer;
        const auto write = [copy = storage, target]() mutable { put_document(copy, target); };
        try {
          background ? writer.submit(write) : std::function<void()>(write)();
          writer.wait();
        } catch (const std::system_error&) { ++failures; }
        REQUIRE(folder.size() == 1);
        REQUIRE(read_text(first) == before);
      }
  };
  attempt({.at_create = 1});
  for (std::int64_t at = 1; at <= writes; ++at) attempt({.at_write = at});
  for (std::int64_t at = 1; at <= bytes; at += 61) attempt({.at_byte = at});
  attempt({.at_commit = 1});
  CHECK(failures == 4 * (2 + writes + (bytes + 60) / 61));
}
