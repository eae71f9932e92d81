// Serves one subject over its standard input and output; suite.py asks. See README.md beside this file.

#include "subject.hpp"

#include <frugal/allocator.hpp>
#include <frugal/version.hpp>

#include <torch/torch.h>
#include <torch/version.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

namespace bench {

double seconds_of(const std::function<void()>& work) {
  const auto wait = [] {
    if (torch::cuda::is_available()) torch::cuda::synchronize();
  };
  wait();
  const auto started = std::chrono::steady_clock::now();
  work();
  wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

namespace {

// A line of /proc/self/status, in bytes; 0 where there is none.
std::int64_t status(const std::string& name) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(name)) return std::stoll(line.substr(name.size() + 1)) * 1024;
  return 0;
}

// The peak of the resident size starts anew.
void forget_peak() { std::ofstream("/proc/self/clear_refs") << 5; }

// The arguments are suite.py's, which knows what it says: `kind --name value ...` and flags.
Settings parse(int argc, char** argv) {
  Settings settings;
  if (argc < 2) throw std::invalid_argument("Say what to serve: step, update, save, epoch, probe, ceiling, target.");
  settings.kind = argv[1];
  const std::map<std::string, std::string*> texts = {
      {"--workload", &settings.workload}, {"--loop", &settings.loop},     {"--precision", &settings.precision},
      {"--method", &settings.method},     {"--device", &settings.device}, {"--directory", &settings.directory},
      {"--data", &settings.data}};
  const std::map<std::string, std::pair<bool*, bool>> flags = {
      {"--forward-backward", {&settings.forward_backward, true}},
      {"--channels-last", {&settings.channels_last, true}},
      {"--unfused", {&settings.fused, false}},
      {"--clip", {&settings.clip, true}},
      {"--attention-fp32", {&settings.attention_in_fp32, true}},
      {"--casts-per-step", {&settings.casts_per_step, true}},
      {"--lagged-skips", {&settings.lagged_skips, true}},
      {"--tuned", {&settings.tuned, true}}};
  for (int i = 2; i < argc; ++i) {
    const std::string name = argv[i];
    if (const auto flag = flags.find(name); flag != flags.end()) {
      *flag->second.first = flag->second.second;
      continue;
    }
    if (i + 1 == argc) throw std::invalid_argument(name + " is unknown or lacks its value.");
    const std::string value = argv[++i];
    if (const auto text = texts.find(name); text != texts.end()) *text->second = value;
    else if (name == "--batch") settings.batch = std::stoll(value);
    else if (name == "--window") settings.window = std::stoll(value);
    else if (name == "--split") settings.window = settings.split = std::stoll(value);
    else if (name == "--threads") settings.threads = std::stoi(value);
    else if (name == "--seed") settings.seed = std::stoull(value);
    else if (name == "--target") settings.target = std::stod(value);
    else throw std::invalid_argument(name + " is unknown.");
  }
  if (settings.directory.empty()) settings.directory = std::filesystem::temp_directory_path().string();
  return settings;
}

std::unique_ptr<Subject> make(const Settings& settings) {
  using Make = std::unique_ptr<Subject> (*)(const Settings&);
  const std::map<std::string, Make> kinds = {
      {"step", make_training_step}, {"update", make_update}, {"save", make_save},
      {"epoch", make_epoch},        {"probe", make_probe},   {"ceiling", make_ceiling},
#ifdef FRUGAL_BENCH_TARGETS  // they read compressed data
      {"target", make_target},
#endif
  };
  const auto found = kinds.find(settings.kind);
  if (found == kinds.end()) throw std::invalid_argument("There is no subject " + settings.kind + ". See --help.");
  return found->second(settings);
}

std::string blas() {
  const std::string config = at::show_config();
  for (const char* name : {"MKL", "OpenBLAS", "Accelerate"})
    if (config.find(name) != std::string::npos) return name;
  return "unknown";
}

Json hello(const Subject& subject) {
  const std::string version = std::to_string(FRUGAL_VERSION_MAJOR) + '.' + std::to_string(FRUGAL_VERSION_MINOR) + '.' +
                              std::to_string(FRUGAL_VERSION_PATCH);
  std::ostringstream compiler;
#if defined(__clang__)
  compiler << "clang " << __clang_major__ << '.' << __clang_minor__;
#else
  compiler << "g++ " << __GNUC__ << '.' << __GNUC_MINOR__;
#endif
  return Json{{"subject", subject.what()},
              {"work", subject.work()},
              {"threads", torch::get_num_threads()},
              {"versions",
               Json{{"frugal", version}, {"torch", TORCH_VERSION}, {"compiler", compiler.str()}, {"blas", blas()}}}};
}

Json answer(Subject& subject, const std::string& request, std::int64_t at_start) {
  std::istringstream words(request);
  std::string verb, file;
  std::int64_t n = 1;
  words >> verb;
  if (verb == "run" || verb == "check" || verb == "count" || verb == "instructions") words >> n;
  words >> file;
  if (verb == "run") return subject.run(n);
  if (verb == "check") return subject.check(n, file);
  if (verb == "compare") return subject.compare(file);
  if (verb == "count") return subject.count(n);
  if (verb == "instructions") return subject.instructions(n);
  if (verb == "export") return subject.export_to(file);
  if (verb == "memory") return Json{{"peak", status("VmHWM:") - at_start}};
  throw std::invalid_argument("There is no request " + verb);
}

Json error_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return Json{{"error", of_torch ? std::string(of_torch->what_without_backtrace()) : error.what()}};
}

// Nothing but answers reaches standard output, whatever the libraries print.
class Answers {
 public:
  Answers() : out_(::fdopen(::dup(STDOUT_FILENO), "w")) { ::dup2(STDERR_FILENO, STDOUT_FILENO); }
  void say(const Json& json) const {
    std::fprintf(out_, "%s\n", json.text().c_str());
    std::fflush(out_);
  }

 private:
  std::FILE* out_;
};

int serve(int argc, char** argv) {
  const Answers answers;
  std::unique_ptr<Subject> subject;
  const std::int64_t at_start = status("VmRSS:");
  forget_peak();
  try {
    const Settings settings = parse(argc, argv);
    if (settings.tuned) frugal::tune_allocator();
    torch::set_num_threads(settings.threads);
    subject = make(settings);
  } catch (const std::exception& error) {
    answers.say(error_of(error));
    return 1;
  }
  answers.say(hello(*subject));
  for (std::string request; std::getline(std::cin, request);) {
    try {
      answers.say(answer(*subject, request, at_start));
    } catch (const std::exception& error) { answers.say(error_of(error)); }
  }
  return 0;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) { return bench::serve(argc, argv); }
