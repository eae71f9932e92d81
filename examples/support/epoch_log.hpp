#pragma once

#include <frugal/policy.hpp>

#include <filesystem>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <string>

namespace examples {

// Writes one line per epoch into DIRECTORY/epochs.csv; without a directory it does nothing.
class EpochLog {
 public:
  static constexpr frugal::Role role = frugal::Role::observer;

  explicit EpochLog(const std::filesystem::path& directory) {
    if (directory.empty()) return;
    std::filesystem::create_directories(directory);
    file_.open(directory / "epochs.csv");
    if (!file_) throw std::runtime_error("cannot write into " + directory.string());
    file_ << "epoch,step,skipped,samples,loss,accuracy,rate,norm\n";
  }

  void on_epoch(const frugal::Progress& at, const frugal::Readings& now) {
    if (!file_.is_open()) return;
    const auto reading = [&](const char* name) {
      return now.find(name).value_or(std::numeric_limits<double>::quiet_NaN());
    };
    file_ << at.epoch << ',' << at.step << ',' << at.skipped << ',' << at.samples << ',' << at.loss << ',' << at.metric
          << ',' << reading("rate") << ',' << reading("norm") << std::endl;  // on disk, whatever happens next
  }

 private:
  std::ofstream file_;
};

}  // namespace examples
