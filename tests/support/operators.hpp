#pragma once

#include <ATen/record_function.h>

#include <map>
#include <string>

/// Counts LibTorch's operator calls while it lives. `aten::_local_scalar_dense` is what reads a value back from a
/// device.
class Operators {
 public:
  Operators()
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&note).scopes({at::RecordScope::FUNCTION}))) {
    counts().clear();
  }
  Operators(const Operators&) = delete;
  ~Operators() { at::removeCallback(handle_); }

  int operator[](const std::string& name) const { return counts().contains(name) ? counts().at(name) : 0; }
  int reads() const { return (*this)["aten::_local_scalar_dense"]; }
  int total() const {
    int sum = 0;
    for (const auto& [name, count] : counts()) sum += count;
    return sum;
  }

 private:
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
    ++counts()[function.name()];
    return nullptr;
  }
  static std::map<std::string, int>& counts() {
    static std::map<std::string, int> all;
    return all;
  }
  at::CallbackHandle handle_;
};
