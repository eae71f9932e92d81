#pragma once

#include <frugal/policy.hpp>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

namespace examples {

// Writes one line per epoch into DIRECTORY/epochs.csv; without a directory it does nothing. A run that was continued
// goes on behind the last epoch that it remembers, in the same file.
class EpochLog {
 public:
  static constexpr frugal::Role role = frugal::Role::observer;

  explicit EpochLog(const std::filesystem::path& directory) {
    if (directory.empty()) return;
    std::filesystem::create_directories(directory);
    path_ = directory / "epochs.csv";
    file_.open(path_, std::ios::app);  // says at once whether it can be written
    if (!file_) throw std::runtime_error("cannot write " + path_.string());
  }

  void on_epoch(const frugal::Progress& at, const frugal::Readings& now) {
    if (path_.empty()) return;
    if (!begun_) begin(at.epoch);
    const auto reading = [&](const char* name) {
      return now.find(name).value_or(std::numeric_limits<double>::quiet_NaN());
    };
    file_ << at.epoch << ',' << at.step << ',' << at.skipped << ',' << at.samples << ',' << at.loss << ',' << at.metric
          << ',' << reading("rate") << ',' << reading("norm") << std::endl;  // on disk, whatever happens next
  }

 private:
  // Keeps the lines of earlier epochs. A run that was killed between a line and its checkpoint repeats the epoch.
  void begin(std::int64_t epoch) {
    std::ostringstream kept;
    kept << "epoch,step,skipped,samples,loss,accuracy,rate,norm\n";
    std::ifstream before(path_);
    std::string line;
    std::getline(before, line);
    while (std::getline(before, line))
      if (!before.eof() && std::stoll(line) < epoch) kept << line << '\n';
    file_.close();
    file_.open(path_, std::ios::trunc);
    file_ << kept.str();
    begun_ = true;
  }

  std::filesystem::path path_;
  std::ofstream file_;
  bool begun_ = false;
};

}  // namespace examples
