#include "support/catch.hpp"
#include "support/temporary_directory.hpp"

#include <frugal/detail/storage_local.hpp>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace fs = std::filesystem;

namespace {

// What this thread asks of the system from here on, and what goes wrong with it.
struct SystemCalls {
  std::vector<std::string> order = {};
  int file_sync_error = 0, directory_sync_error = 0;  // errno
  bool disturbed = false;                             // every second call is interrupted; at most 3 bytes a write
  bool robbed = false;                                // the next file that is to be locked is removed just before
  int calls = 0;

  bool interrupted() { return disturbed && ++calls % 2 == 1 && (errno = EINTR); }
};
thread_local SystemCalls* watched = nullptr;

class Watch {
 public:
  explicit Watch(SystemCalls& calls) { watched = &calls; }
  Watch(const Watch&) = delete;
  ~Watch() { watched = nullptr; }
};

}  // namespace

// The program's own definitions of these come before the C library's.
extern "C" int fsync(int file) {
  if (watched) {
    struct stat status{};
    ::fstat(file, &status);
    const bool directory = S_ISDIR(status.st_mode);
    if (watched->interrupted()) return -1;
    watched->order.push_back(directory ? "sync directory" : "sync file");
    errno = directory ? watched->directory_sync_error : watched->file_sync_error;
    if (errno != 0) return -1;
  }
  return static_cast<int>(::syscall(SYS_fsync, file));
}
extern "C" int rename(const char* from, const char* to) noexcept {
  if (watched) watched->order.push_back("rename");
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
extern "C" int flock(int file, int operation) noexcept {
  if (watched && std::exchange(watched->robbed, false))
    fs::remove(fs::read_symlink("/proc/self/fd/" + std::to_string(file)));
  return static_cast<int>(::syscall(SYS_flock, file, operation));
}
extern "C" ssize_t write(int file, const void* bytes, size_t size) {
  if (watched) {
    if (watched->interrupted()) return -1;
    watched->order.push_back("write");
    if (watched->disturbed && size > 3) size = 3;
  }
  return ::syscall(SYS_write, file, bytes, size);
}

namespace {

using frugal::LocalFiles;

void store(const fs::path& target, const std::string& text) {
  auto file = LocalFiles{}.create(target);
  file.write(bytes_of(text));
  file.commit();
}

// Limits the size of the files that this process writes.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    before_ = std::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &limit_);
    const rlimit lower{bytes, limit_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &lower);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &limit_);
    std::signal(SIGXFSZ, before_);
  }

 private:
  rlimit limit_{};
  void (*before_)(int);
};

}  // namespace

static_assert(std::is_move_constructible_v<LocalFiles::File> && !std::is_copy_constructible_v<LocalFiles::File>);

TEST_CASE("a file is nowhere before its commit, and whole after it", "[storage]") {
  const TemporaryDirectory folder;
  auto file = LocalFiles{}.create(folder / "a");
  file.write(bytes_of("one "));
  file.write({});
  file.write(bytes_of("two"));
  CHECK_FALSE(fs::exists(folder / "a"));
  file.commit();
  CHECK(read_text(folder / "a") == "one two");
  CHECK(folder.size() == 1);
}

TEST_CASE("a commit replaces what was there; until then it is as it was", "[storage]") {
  const TemporaryDirectory folder;
  store(folder / "a", "old");
  auto file = LocalFiles{}.create(folder / "a");
  file.write(bytes_of("new"));
  CHECK(read_text(folder / "a") == "old");
  file.commit();
  CHECK(read_text(folder / "a") == "new");
  CHECK_THROWS_AS(file.commit(), std::invalid_argument);
  CHECK(read_text(folder / "a") == "new");
}

TEST_CASE("a file without commit leaves nothing behind", "[storage]") {
  const TemporaryDirectory folder;
  store(folder / "a", "old");
  {
    auto file = LocalFiles{}.create(folder / "a");
    file.write(bytes_of("new"));
    CHECK(folder.size() == 2);
    auto moved = std::move(file);
    moved.write(bytes_of("more"));
  }
  CHECK(folder.size() == 1);
  CHECK(read_text(folder / "a") == "old");
}

TEST_CASE("a file that was moved is the file, whatever becomes of the empty one", "[storage]") {
  const TemporaryDirectory folder;
  std::optional<LocalFiles::File> file(LocalFiles{}.create(folder / "a"));
  LocalFiles::File moved = std::move(*file);
  file.reset();
  moved.write(bytes_of("text"));
  moved.commit();
  CHECK(read_text(folder / "a") == "text");
}

TEST_CASE("a temporary that was cleared up between its creation and its lock is made again", "[storage]") {
  const TemporaryDirectory folder;
  SystemCalls calls{.robbed = true};
  {
    const Watch watch(calls);
    store(folder / "a", "text");
  }
  CHECK_FALSE(calls.robbed);
  CHECK(read_text(folder / "a") == "text");
}

TEST_CASE("two files on the way to one target do not mix", "[storage]") {
  const TemporaryDirectory folder;
  auto first = LocalFiles{}.create(folder / "a"), second = LocalFiles{}.create(folder / "a");
  first.write(bytes_of("first"));
  second.write(bytes_of("second"));
  first.commit();
  CHECK(read_text(folder / "a") == "first");
  second.commit();
  CHECK(read_text(folder / "a") == "second");
  CHECK(folder.size() == 1);
}

TEST_CASE("missing directories are made", "[storage]") {
  const TemporaryDirectory folder;
  store(folder / "x/y/z/a", "deep");
  CHECK(read_text(folder / "x/y/z/a") == "deep");
  frugal::detail::make_directory(folder / "p/q/");
  frugal::detail::make_directory(folder / "p/q/");
  CHECK(fs::is_directory(folder / "p/q"));
  frugal::detail::make_directory("");
  frugal::detail::sync_directory("");
}

TEST_CASE("a relative path without a directory means the current one", "[storage]") {
  const TemporaryDirectory folder;
  const fs::path before = fs::current_path();
  fs::current_path(folder.path());
  store("plain", "here");
  fs::current_path(before);
  CHECK(read_text(folder / "plain") == "here");
}

TEST_CASE("a commit: the file is durable before it is visible, and then its name", "[storage]") {
  const TemporaryDirectory folder;
  SystemCalls calls;
  {
    const Watch watch(calls);
    store(folder / "a", "text");
  }
  CHECK(calls.order == std::vector<std::string>{"write", "sync file", "rename", "sync directory"});
}

TEST_CASE("a new directory is durable in the one that holds it", "[storage]") {
  const TemporaryDirectory folder;
  SystemCalls calls;
  {
    const Watch watch(calls);
    frugal::detail::make_directory(folder / "x/y");
  }
  CHECK(calls.order == std::vector<std::string>{"sync directory", "sync directory"});
}

TEST_CASE("interrupted calls go on, short writes too", "[storage]") {
  const TemporaryDirectory folder;
  SystemCalls calls{.disturbed = true};
  {
    const Watch watch(calls);
    store(folder / "a", "seven letters");
  }
  CHECK(read_text(folder / "a") == "seven letters");
  CHECK(calls.order.size() == 5 + 3);
}

TEST_CASE("what could not be made durable does not replace the old file", "[storage]") {
  const TemporaryDirectory folder;
  store(folder / "a", "old");
  SystemCalls broken{.file_sync_error = EIO};
  {
    const Watch watch(broken);
    CHECK_THROWS_WITH(store(folder / "a", "new"), ContainsSubstring("cannot make durable"));
  }
  CHECK(read_text(folder / "a") == "old");
  CHECK(folder.size() == 1);
}

TEST_CASE("a name that could not be made durable is an error, unless the file system knows no such thing",
          "[storage]") {
  const TemporaryDirectory folder;
  SystemCalls broken{.directory_sync_error = EIO}, simple{.directory_sync_error = EINVAL};
  {
    const Watch watch(broken);
    CHECK_THROWS_WITH(store(folder / "a", "new"),
                      ContainsSubstring("directory") && ContainsSubstring(folder.path().string()));
  }
  CHECK(read_text(folder / "a") == "new");  // in place, complete
  {
    const Watch watch(simple);
    CHECK_NOTHROW(store(folder / "b", "new"));
  }
  CHECK(folder.size() == 2);
}

TEST_CASE("what cannot be done is an error that names the file", "[storage]") {
  const TemporaryDirectory folder;
  store(folder / "file", "text");
  CHECK_THROWS_WITH(store(folder / "file/a", "x"),
                    ContainsSubstring("LocalFiles: cannot") && ContainsSubstring("file"));
  fs::create_directory(folder / "full");
  store(folder / "full/inside", "x");
  CHECK_THROWS_WITH(store(folder / "full", "x"), ContainsSubstring("cannot rename") && ContainsSubstring("full"));
  CHECK(folder.size() == 2);  // the temporary of the failed commit is gone
  CHECK_THROWS_AS(LocalFiles{}.remove(folder / "full"), std::system_error);
  CHECK_THROWS_WITH(LocalFiles{}.create(folder / std::string(300, 'n')), ContainsSubstring("cannot create"));
}

TEST_CASE("a write that the disk refuses is an error, and the old file stays", "[storage]") {
  const TemporaryDirectory folder;
  store(folder / "a", "old");
  {
    const FileSizeLimit limit(1000);
    auto file = LocalFiles{}.create(folder / "a");
    try {
      file.write(bytes_of(std::string(5000, 'x')));  // the first 1000 bytes go through: a short write
      FAIL("a short write went unnoticed");
    } catch (const std::system_error& error) {
      CHECK(error.code().value() == EFBIG);
      CHECK_THAT(error.what(), ContainsSubstring("cannot write '" + folder.path().string()));
    }
  }
  CHECK(read_text(folder / "a") == "old");
  CHECK(folder.size() == 1);
}

TEST_CASE("remove removes, and is content when there is nothing", "[storage]") {
  const TemporaryDirectory folder;
  store(folder / "a", "text");
  LocalFiles{}.remove(folder / "a");
  LocalFiles{}.remove(folder / "a");
  CHECK(folder.size() == 0);
}

TEST_CASE("temporaries of dead writers go, those of living ones and other files stay", "[storage]") {
  const TemporaryDirectory folder;
  auto living = LocalFiles{}.create(folder / "checkpoint-00000002.safetensors");
  living.write(bytes_of("half"));
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {  // dies in the middle of a write
    auto file = LocalFiles{}.create(folder / "checkpoint-00000001.safetensors");
    file.write(bytes_of("half"));
    ::raise(SIGKILL);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFSIGNALED(status));
  REQUIRE(folder.size() == 2);
  for (const char* name : {"notes.tmp", ".hidden", ".other.tmp", "x.safetensors"}) write_text(folder / name, "mine");

  CHECK(frugal::detail::remove_dead_temporaries(folder.path()) == 1);
  CHECK(folder.size() == 5);
  CHECK(frugal::detail::remove_dead_temporaries(folder.path()) == 0);
  living.commit();
  CHECK(read_text(folder / "checkpoint-00000002.safetensors") == "half");
  CHECK(frugal::detail::remove_dead_temporaries(folder / "not there") == 0);
}

TEST_CASE("many threads write at once, beside one that clears up", "[storage]") {
  const TemporaryDirectory folder;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 25; ++i)
        store(folder / (std::to_string(t) + ".safetensors"), std::string(1000, static_cast<char>('a' + i)));
    });
  for (int i = 0; i < 200; ++i) frugal::detail::remove_dead_temporaries(folder.path());
  for (auto& thread : threads) thread.join();
  CHECK(folder.size() == 4);
  for (int t = 0; t < 4; ++t) CHECK(read_text(folder / (std::to_string(t) + ".safetensors")) == std::string(1000, 'y'));
}
