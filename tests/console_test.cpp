#include "support/catch.hpp"

#include <frugal/console.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

namespace {

// A stream whose text can be read back.
class Captured {
 public:
  Captured() : stream_(open_memstream(&text_, &size_)) {}
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;
  ~Captured() {
    std::fclose(stream_);
    std::free(text_);
  }
  std::FILE* stream() const { return stream_; }
  std::string text() const {
    std::fflush(stream_);
    return {text_, size_};
  }

 private:
  char* text_ = nullptr;
  std::size_t size_ = 0;
  std::FILE* stream_;
};

// A variable of the environment, until the end of the scope.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    set(value);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  ~Environment() { set(before_ ? before_->c_str() : nullptr); }

 private:
  void set(const char* value) {
    if (value) setenv(name_, value, 1);
    else unsetenv(name_);
  }
  const char* name_;
  std::optional<std::string> before_;
};

// The environment of these tests, whatever the one around them is.
struct Plain { Environment locale{"LC_ALL", "C"}, color{"NO_COLOR", "1"}, ci{"CI", nullptr}, term{"TERM", "xterm"}; };

struct FakeClock {
  std::chrono::steady_clock::time_point now{};
  void advance(double seconds) {
    now += std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
  }
};

frugal::Progress at(std::int64_t epoch, std::int64_t batch, std::int64_t batches = 10) {
  const std::int64_t step = epoch * batches + batch;
  return {.epoch = epoch, .micro_batch = batch, .step = step, .samples = 100 * step};
}

const frugal::Readings nothing;

// What a terminal shows of the line that was drawn last.
std::string last_drawn(const std::string& text) {
  const auto begin = text.rfind('\r');
  std::string line = begin == std::string::npos ? text : text.substr(begin + 1);
  if (const auto end = line.find("\033[K"); end != std::string::npos) line.resize(end);
  return line;
}

}  // namespace

TEST_CASE("a run on a terminal is one line that is redrawn, and one line that stays per epoch", "[console]") {
  const Plain plain;
  const Captured out;
  FakeClock clock;
  frugal::ProgressBar bar({.stream = out.stream(),
                           .epochs = 4,
                           .batches_per_epoch = 10,
                           .style = frugal::ProgressStyle::bar,
                           .width = 120,
                           .clock = [&] { return clock.now; }});
  frugal::Readings readings;
  readings.write("rate", 0.001);
  auto progress = at(0, 1);
  progress.loss = 1.5;
  bar.on_step(progress, readings);
  CHECK(out.text() == "\repoch 1/4  10%  [###                           ]  loss 1.5  rate 0.001\033[K");

  clock.advance(2);
  progress = at(0, 5);
  progress.loss = 0.34567;
  progress.metric = 0.912345;
  progress.skipped = 2;
  bar.on_step(progress, readings);
  // 4 of 10 batches in 2 s, 35 more to go; 400 samples in 2 s
  CHECK(last_drawn(out.text()) ==
        "epoch 1/4  50%  [###############               ]  loss 0.3457  metric 0.9123  eta 0:18  200/s  rate 0.001  "
        "skipped 2");

  clock.advance(3);
  progress = at(1, 0);
  progress.loss = 0.25;
  progress.metric = 0.95;
  bar.on_epoch(progress, readings);
  CHECK(last_drawn(out.text()) == "epoch 1/4  loss 0.25  metric 0.95  rate 0.001  180 samples/s  0:05");
  CHECK(out.text().ends_with("0:05\033[K\n"));

  bar.on_step(at(1, 3), nothing);
  CHECK(last_drawn(out.text()).starts_with("epoch 2/4  30%  ["));
  CHECK(out.text().find('\n') == out.text().rfind('\n'));
}

TEST_CASE("everywhere else there are plain lines: one per epoch, and few within long ones", "[console]") {
  const Plain plain;
  const Captured out;
  FakeClock clock;
  frugal::ProgressBar bar(
      {.stream = out.stream(), .epochs = 2, .batches_per_epoch = 10, .clock = [&] { return clock.now; }});
  for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
    for (std::int64_t batch = 1; batch <= 10; ++batch) {
      clock.advance(7);
      auto progress = at(epoch, batch);
      progress.loss = 2;
      if (bar.due(progress)) bar.on_step(progress, nothing);
    }
    auto end = at(epoch + 1, 0);
    end.metric = 0.5;
    bar.on_epoch(end, nothing);
  }
  CHECK(out.text() ==
        "epoch 1/2  60%  loss 2  eta 1:38  14.3 samples/s\n"
        "epoch 1/2  metric 0.5  14.3 samples/s  1:03\n"
        "epoch 2/2  50%  loss 2  eta 0:35  14.3 samples/s\n"
        "epoch 2/2 100%  loss 2  eta 0:00  14.3 samples/s\n"
        "epoch 2/2  metric 0.5  14.3 samples/s  1:10\n");
}

TEST_CASE("it is due at most once per interval, so that the loss is rarely read", "[console]") {
  const Plain plain;
  const Captured out;
  FakeClock clock;
  frugal::ProgressBar bar(
      {.stream = out.stream(), .min_interval = 0.5, .style = frugal::ProgressStyle::bar, .clock = [&] {
         return clock.now;
       }});
  STATIC_REQUIRE(frugal::ProgressBar::reads_loss);
  CHECK(bar.due(at(0, 1)));
  bar.on_step(at(0, 1), nothing);
  CHECK_FALSE(bar.due(at(0, 2)));
  clock.advance(0.49);
  CHECK_FALSE(bar.due(at(0, 3)));
  clock.advance(0.02);
  CHECK(bar.due(at(0, 4)));
  bar.on_epoch(at(1, 0), nothing);
  CHECK_FALSE(bar.due(at(1, 1)));
}

TEST_CASE("the length of an epoch is learnt from the first one", "[console]") {
  const Plain plain;
  const Captured out;
  FakeClock clock;
  frugal::ProgressBar bar(
      {.stream = out.stream(), .epochs = 3, .style = frugal::ProgressStyle::bar, .width = 100, .clock = [&] {
         return clock.now;
       }});
  bar.on_step(at(0, 2), nothing);
  clock.advance(4);
  bar.on_step(at(0, 6), nothing);
  CHECK(last_drawn(out.text()) == "epoch 1/3 step 6  100/s");
  clock.advance(4);
  bar.on_epoch(at(1, 0), nothing);
  clock.advance(5);
  bar.on_step(at(1, 5), nothing);
  // 13 of 30 batches in 13 s since the first look
  CHECK(last_drawn(out.text()) == "epoch 2/3  50%  [###############               ]  eta 0:15  100/s");
}

TEST_CASE("a run that was resumed in the middle reads like any other", "[console]") {
  const Plain plain;
  const Captured out;
  FakeClock clock;
  frugal::ProgressBar bar(
      {.stream = out.stream(), .epochs = 10, .style = frugal::ProgressStyle::bar, .width = 100, .clock = [&] {
         return clock.now;
       }});
  bar.on_step(at(7, 4), nothing);
  CHECK(last_drawn(out.text()) == "epoch 8/10 step 74");
  clock.advance(6);
  bar.on_epoch(at(8, 0), nothing);
  CHECK(last_drawn(out.text()) == "epoch 8/10  100 samples/s  0:06");
  clock.advance(2);
  bar.on_step(at(8, 2), nothing);
  CHECK(last_drawn(out.text()) == "epoch 9/10  20%  [######                        ]  eta 0:18  100/s");

  bar.reset();
  bar.on_step(at(0, 1), nothing);
  CHECK(last_drawn(out.text()) == "epoch 1/10  10%  [###                           ]");
}

TEST_CASE("without the number of epochs the time left is the epoch's, and numbers that are not there are left out",
          "[console]") {
  const Plain plain;
  const Captured out;
  FakeClock clock;
  frugal::ProgressBar bar({.stream = out.stream(),
                           .batches_per_epoch = 10,
                           .readings = {"norm", "rate"},
                           .style = frugal::ProgressStyle::bar,
                           .width = 100,
                           .clock = [&] { return clock.now; }});
  bar.on_step(at(2, 1), nothing);
  clock.advance(4000);
  auto progress = at(2, 3);
  progress.loss = std::numeric_limits<double>::infinity();
  frugal::Readings readings;
  readings.write("norm", 12.345);
  readings.write("rate", std::numeric_limits<double>::quiet_NaN());
  bar.on_step(progress, readings);
  CHECK(last_drawn(out.text()) ==
        "epoch 3  30%  [#########                     ]  loss inf  eta 3:53:20  0.05/s  norm 12.35");
  progress.samples = 0;
  bar.on_step(progress, nothing);
  CHECK(out.text().find("0.00 steps/s") != std::string::npos);
}

TEST_CASE("a line never wraps, whatever the width", "[console]") {
  const Plain plain;
  FakeClock clock;
  frugal::Readings readings;
  readings.write("rate", 0.00012345);
  for (int width = 1; width < 130; ++width) {
    const Captured out;
    frugal::ProgressBar bar({.stream = out.stream(),
                             .epochs = 1000,
                             .batches_per_epoch = 10,
                             .style = frugal::ProgressStyle::bar,
                             .width = width,
                             .clock = [&] { return clock.now; }});
    auto progress = at(100, 1);
    progress.loss = progress.metric = 0.12345;
    bar.on_step(progress, readings);
    clock.advance(1);
    progress = at(100, 9);
    progress.loss = progress.metric = 0.12345;
    bar.on_step(progress, readings);
    CHECK(last_drawn(out.text()).size() < static_cast<std::size_t>(width));
    if (width >= 100) CHECK(last_drawn(out.text()).find("rate 0.0001234") != std::string::npos);
    if (width >= 40) CHECK(last_drawn(out.text()).find("[###") != std::string::npos);
  }
}

TEST_CASE("blocks where the locale is UTF-8, colour unless NO_COLOR is set", "[console]") {
  const Plain plain;
  const auto drawn = [] {
    const Captured out;
    frugal::ProgressBar bar(
        {.stream = out.stream(), .batches_per_epoch = 10, .style = frugal::ProgressStyle::bar, .width = 27});
    bar.on_step(at(0, 5), nothing);
    return last_drawn(out.text());
  };
  CHECK(drawn() == "epoch 1  50%  [#####     ]");
  {
    const Environment locale("LC_ALL", "de_DE.UTF-8");
    CHECK(drawn() == "epoch 1  50%  [█████     ]");
    const Environment color("NO_COLOR", nullptr);
    CHECK(drawn() == "epoch 1  50%  [\033[32m█████\033[0m     ]");
  }
  const Environment all("LC_ALL", nullptr), type("LC_CTYPE", nullptr);
  {
    const Environment lang("LANG", "C.utf8");
    CHECK(drawn() == "epoch 1  50%  [█████     ]");
  }
  const Environment lang("LANG", nullptr);
  CHECK(drawn() == "epoch 1  50%  [#####     ]");
}

TEST_CASE("a bar needs a terminal that can redraw", "[console]") {
  const Plain plain;
  int user = -1, program = -1;
  winsize size{};
  size.ws_col = 50;
  REQUIRE(openpty(&user, &program, nullptr, nullptr, &size) == 0);
  std::FILE* terminal = fdopen(program, "w");
  CHECK(frugal::detail::can_redraw(terminal));
  CHECK(frugal::detail::columns_of(terminal) == 50);
  {
    frugal::ProgressBar bar({.stream = terminal, .batches_per_epoch = 10, .readings = {"a", "b"}});
    bar.on_step(at(0, 5), nothing);
    char text[256] = {};
    REQUIRE(read(user, text, sizeof text - 1) > 0);
    CHECK(std::string(text).starts_with("\repoch 1  50%  [###"));
    CHECK(last_drawn(text).size() < 50);

    size.ws_col = 20;  // the window was made smaller
    REQUIRE(ioctl(program, TIOCSWINSZ, &size) == 0);
    bar.on_step(at(0, 6), nothing);
    std::fill(std::begin(text), std::end(text), '\0');
    REQUIRE(read(user, text, sizeof text - 1) > 0);
    CHECK(last_drawn(text) == "epoch 1  60%");
  }
  {
    const Environment term("TERM", "dumb");
    CHECK_FALSE(frugal::detail::can_redraw(terminal));
  }
  {
    const Environment term("TERM", nullptr);
    CHECK_FALSE(frugal::detail::can_redraw(terminal));
  }
  {
    const Environment ci("CI", "true");
    CHECK_FALSE(frugal::detail::can_redraw(terminal));
  }
  const Captured file;
  CHECK_FALSE(frugal::detail::can_redraw(file.stream()));
  CHECK(frugal::detail::columns_of(file.stream()) == 80);
  std::fclose(terminal);
  close(user);
}

TEST_CASE("an open line is ended once, by its last owner", "[console]") {
  const Plain plain;
  const Captured out;
  const auto ends = [&] { return std::ranges::count(out.text(), '\n'); };
  {
    frugal::ProgressBar bar({.stream = out.stream(), .batches_per_epoch = 10, .style = frugal::ProgressStyle::bar});
    { frugal::ProgressBar untouched({.stream = out.stream(), .style = frugal::ProgressStyle::bar}); }
    CHECK(out.text().empty());
    bar.on_step(at(0, 5), nothing);
    frugal::ProgressBar moved(std::move(bar));
    const auto before = out.text();
    bar.on_step(at(0, 6), nothing);  // moved from: says nothing
    bar.on_epoch(at(1, 0), nothing);
    bar.finish();
    CHECK_FALSE(bar.due(at(0, 6)));
    CHECK(out.text() == before);
    CHECK(ends() == 0);
    moved.finish();
    moved.finish();
    CHECK(ends() == 1);
    moved.on_step(at(0, 7), nothing);
    CHECK(ends() == 1);
  }
  CHECK(ends() == 2);
  for (auto style : {frugal::ProgressStyle::bar, frugal::ProgressStyle::lines}) {
    const auto before = ends();
    {
      frugal::ProgressBar ended({.stream = out.stream(), .style = style});
      ended.on_epoch(at(1, 0), nothing);  // this line stays, and has its end
    }
    CHECK(ends() == before + 1);
  }
}

TEST_CASE("no stream: nothing is drawn and nothing is due", "[console]") {
  frugal::ProgressBar off({.stream = nullptr, .style = frugal::ProgressStyle::bar});
  CHECK_FALSE(off.due(at(0, 1)));
  CHECK_NOTHROW(off.on_step(at(0, 1), nothing));
  CHECK_NOTHROW(off.on_epoch(at(1, 0), nothing));
  CHECK_NOTHROW(off.finish());
}

TEST_CASE("negative options are errors", "[console]") {
  using Options = frugal::ProgressBarOptions;
  for (const Options& bad : {Options{.epochs = -1}, Options{.batches_per_epoch = -1}, Options{.min_interval = -1},
                             Options{.line_interval = -1}, Options{.width = -1},
                             Options{.min_interval = std::numeric_limits<double>::quiet_NaN()}})
    CHECK_THROWS_AS(frugal::ProgressBar(bad), std::invalid_argument);
}

TEST_CASE("numbers and durations are short", "[console]") {
  using frugal::detail::short_number;
  CHECK(short_number(0.123) == "0.12");
  CHECK(short_number(9.999) == "10.0");
  CHECK(short_number(99.99) == "100");
  CHECK(short_number(999.4) == "999");
  CHECK(short_number(999.6) == "1.00k");
  CHECK(short_number(12345) == "12.3k");
  CHECK(short_number(3.2e6) == "3.20M");
  CHECK(short_number(5e12) == "5000G");
  using frugal::detail::duration;
  CHECK(duration(0.4) == "0:00");
  CHECK(duration(59.6) == "1:00");
  CHECK(duration(3599) == "59:59");
  CHECK(duration(3600) == "1:00:00");
  CHECK(duration(100 * 3600.0) == "100:00:00");
}
