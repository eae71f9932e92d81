#pragma once

#include <frugal/detail/pace.hpp>
#include <frugal/detail/progress_line.hpp>
#include <frugal/detail/terminal.hpp>
#include <frugal/policy.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace frugal::inline v0 {

/// bar: one line that is redrawn. lines: whole lines, for logs. automatic: a bar on a terminal, else lines (with TERM
/// unset or dumb and in continuous integration, too).
enum class ProgressStyle { automatic, bar, lines };

struct ProgressBarOptions {
  std::FILE* stream = stderr;          ///< must stay open as long as the bar lives; nullptr switches it off
  std::int64_t epochs = 0;             ///< of the whole run, for the time that is left; 0: unknown
  std::int64_t batches_per_epoch = 0;  ///< micro-batches in an epoch, Batches::size(); 0: known after the first epoch
  double min_interval = 0.1;           ///< seconds between two redraws of the bar, at least
  double line_interval = 30;           ///< seconds between two lines within an epoch, at least
  std::vector<std::string> readings = {"rate"};  ///< what to show of Readings, where somebody publishes it
  ProgressStyle style = ProgressStyle::automatic;
  int width = 0;  ///< columns; 0: those of the terminal at every redraw
  std::function<std::chrono::steady_clock::time_point()> clock = {};  ///< empty: std::chrono::steady_clock::now
};

/// Shows where a run is: a bar with rate, time left, loss, metric and learning rate on a terminal, plain lines
/// elsewhere.
///
///     frugal::Trainer trainer{model, optimizer, loss, frugal::ProgressBar({.epochs = 20})};
///     trainer.fit(batches, validate, {.epochs = 20});
///     // epoch 3/20  45% [#########           ]  loss 0.3456  metric 0.9123  eta 1:23  12.3k/s  rate 0.001
///
/// Every epoch leaves one line. Between them it draws at most every `min_interval` (`line_interval` for lines), and
/// only then is the loss read, which is a device sync; all other steps cost one look at the clock. Numbers that are not
/// there are left out, and so are those that do not fit the width. UTF-8 where the locale says so, colour unless
/// NO_COLOR is set. Without `batches_per_epoch` there is no bar before the first epoch has ended. Not copyable: a line
/// has one owner.
class ProgressBar {
 public:
  static constexpr Role role = Role::observer;
  static constexpr bool reads_loss = true;

  /// Throws std::invalid_argument on a negative option.
  explicit ProgressBar(ProgressBarOptions options = {})
      : options_(std::move(options)), out_(options_.stream), pace_(options_.epochs, options_.batches_per_epoch) {
    if (options_.epochs < 0 || options_.batches_per_epoch < 0 || options_.width < 0 || !(options_.min_interval >= 0) ||
        !(options_.line_interval >= 0))
      throw std::invalid_argument("ProgressBar: an option is negative. Use 0 for what is not known.");
    if (options_.style == ProgressStyle::automatic)
      options_.style = out_ && detail::can_redraw(out_.get()) ? ProgressStyle::bar : ProgressStyle::lines;
    interval_ = std::chrono::duration<double>(redraws() ? options_.min_interval : options_.line_interval);
  }

  /// Whether it is time to draw. No allocation.
  bool due(const Progress&) const { return out_ && (!drawn_ || now() - *drawn_ >= interval_); }

  /// Draws. The Trainer calls it after an applied step, when it is due.
  void on_step(const Progress& at, const Readings& readings) {
    if (!out_) return;
    drawn_ = now();
    const bool compares = pace_.look(*drawn_, at);
    if (redraws()) write(bar_line(at, readings), true);
    else if (compares) write(head(at) + detail::joined(running(at, readings, " samples/s")), false);
  }

  /// Leaves one line about the epoch that has ended; its last field is the time that the epoch took.
  void on_epoch(const Progress& at, const Readings& readings) {
    if (!out_) return;
    drawn_ = now();
    pace_.look(*drawn_, at);
    std::vector<std::string> parts;
    add(parts, "loss", at.loss), add(parts, "metric", at.metric);
    add_readings(parts, at, readings), add_speed(parts, " samples/s");
    parts.push_back(detail::duration(pace_.epoch_seconds()));
    write(epoch_name(at.epoch) + detail::joined(parts), false);
    pace_.end_epoch();
  }

  /// The run is over: see finish().
  void on_end(const Progress&) { finish(); }
  /// Ends a line that is being redrawn, so that other output starts on a fresh one. So does the destructor.
  void finish() {
    detail::EndLine& line = out_.get_deleter();
    if (out_) line(out_.get());
    line.open = false;
  }

  /// A new run: forgets the times, not the length of an epoch.
  void reset() { pace_.reset(), drawn_.reset(); }

 private:
  using Time = detail::Pace::Time;

  Time now() const { return options_.clock ? options_.clock() : std::chrono::steady_clock::now(); }
  bool redraws() const { return options_.style == ProgressStyle::bar; }

  // One write per line, so that lines of several processes do not mix.
  void write(std::string text, bool stays_open) {
    if (redraws()) text = "\r" + text + "\033[K";
    if (!stays_open) text += '\n';
    std::fputs(text.c_str(), out_.get());
    std::fflush(out_.get());
    out_.get_deleter().open = stays_open;
  }

  std::string epoch_name(std::int64_t number) const {
    return "epoch " + std::to_string(number) + (options_.epochs > 0 ? "/" + std::to_string(options_.epochs) : "");
  }
  std::string head(const Progress& at) const {
    const auto share = pace_.share();
    return epoch_name(at.epoch + 1) +
           (share ? detail::formatted(" %3.0f%%", std::floor(100 * *share)) : " step " + std::to_string(at.step));
  }
  // One column less than there is: some terminals wrap a line when its last column is written.
  std::string bar_line(const Progress& at, const Readings& readings) const {
    const int columns = options_.width > 0 ? options_.width : detail::columns_of(out_.get());
    const auto room = static_cast<std::size_t>(columns - 1);
    const auto share = pace_.share();
    const std::string front = head(at).substr(0, room);
    const std::size_t taken = front.size() + (share ? detail::least_bar : 0);
    const std::string back = detail::joined(running(at, readings, "/s"), room > taken ? room - taken : 0);
    return front + (share ? detail::bar(room - front.size() - back.size(), *share) : "") + back;
  }

  // The most important first: what does not fit is left out from the end.
  std::vector<std::string> running(const Progress& at, const Readings& readings, const char* unit) const {
    std::vector<std::string> parts;
    add(parts, "loss", at.loss), add(parts, "metric", at.metric);
    if (const auto left = pace_.seconds_left()) parts.push_back("eta " + detail::duration(*left));
    add_speed(parts, unit), add_readings(parts, at, readings);
    return parts;
  }
  void add_speed(std::vector<std::string>& parts, const char* unit) const {
    if (const auto samples = pace_.samples_per_second()) parts.push_back(detail::short_number(*samples) + unit);
    else if (const auto steps = pace_.steps_per_second()) parts.push_back(detail::short_number(*steps) + " steps/s");
  }
  void add_readings(std::vector<std::string>& parts, const Progress& at, const Readings& readings) const {
    for (const std::string& name : options_.readings)
      if (const auto value = readings.find(name)) add(parts, name, *value);
    if (at.skipped > 0) parts.push_back("skipped " + std::to_string(at.skipped));
  }
  static void add(std::vector<std::string>& parts, const std::string& name, double value) {
    if (!std::isnan(value)) parts.push_back(name + detail::formatted(" %.4g", value));
  }

  ProgressBarOptions options_;
  std::unique_ptr<std::FILE, detail::EndLine> out_;
  detail::Pace pace_;
  std::chrono::duration<double> interval_{};
  std::optional<Time> drawn_;
};

}  // namespace frugal::inline v0
