#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// The learning rates that an optimizer started with, and their product with a factor. Keeping them is what makes a
// factor absolute: applied twice, or after a resume with multiplied rates, it never compounds.
namespace frugal::inline v0::detail {

class BaseRates {
 public:
  // Sets the rate of every parameter group to its base times `factor`. Nothing changed when it throws.
  void apply(auto& optimizer, double factor, const char* who) {
    auto& groups = optimizer.param_groups();
    if (groups.size() < base_.size() || (loaded_ && groups.size() != base_.size()))
      throw std::invalid_argument(std::string(who) + ": base learning rates of " + std::to_string(base_.size()) +
                                  " parameter groups are known and the optimizer has " + std::to_string(groups.size()) +
                                  ". Use the optimizer that the schedule, or its checkpoint, was made with.");
    while (base_.size() < groups.size()) base_.push_back(groups[base_.size()].options().get_lr());
    loaded_ = false;
    for (std::size_t i = 0; i < base_.size(); ++i) groups[i].options().set_lr(base_[i] * factor);
    if (!base_.empty()) current_ = base_[0] * factor;
  }

  void readings(auto& out) const {
    if (!std::isnan(current_)) out.write("rate", current_);
  }

  void save(auto& out) const {
    out.write("groups", static_cast<std::int64_t>(base_.size()));
    for (std::size_t i = 0; i < base_.size(); ++i) out.write("base." + std::to_string(i), base_[i]);
  }
  void load(auto& in) {
    std::int64_t groups = 0;
    in.read("groups", groups);
    std::vector<double> base(static_cast<std::size_t>(groups));
    for (std::size_t i = 0; i < base.size(); ++i) in.read("base." + std::to_string(i), base[i]);
    base_ = std::move(base);
    loaded_ = !base_.empty();
  }

 private:
  std::vector<double> base_;
  double current_ = std::numeric_limits<double>::quiet_NaN();  // of the first group, as last set
  bool loaded_ = false;  // the base rates come from a checkpoint and have not met the optimizer yet
};

}  // namespace frugal::inline v0::detail
