#pragma once

#include <frugal/detail/checkpoint_arguments.hpp>
#include <frugal/detail/checkpoint_contents.hpp>
#include <frugal/detail/checkpoint_directory.hpp>
#include <frugal/detail/checkpoint_store.hpp>
#include <frugal/detail/random_state.hpp>
#include <frugal/detail/storage_local.hpp>
#include <frugal/policy.hpp>

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace frugal::inline v0 {

/// background: save() returns when the state is copied, a thread of its own hashes and writes it. blocking: save() returns
/// when the file is durable.
enum class Writing { background, blocking };

/// What a new run does in a directory that holds checkpoints which it has not restored. refuse: an error that says so.
/// append: they count as its own, numbering goes on, retention includes them. discard: they are removed, once the first new
/// one is durable.
enum class Existing { refuse, append, discard };

struct CheckpointManagerOptions {
  std::filesystem::path directory = {};  ///< made when it is needed; empty switches checkpoints off
  std::int64_t keep_last = 2;            ///< the newest ones; at least 1
  std::int64_t keep_best = 1;            ///< and the best ones by Progress::metric
  Goal goal = Goal::minimize;            ///< which metric is the better one
  std::int64_t every_epochs = 1;         ///< 0: not by epochs
  std::int64_t every_steps = 0;          ///< applied optimizer steps; 0: not by steps
  std::chrono::seconds every_time{0};    ///< since the last save; 0: not by time
  Writing writing = Writing::background;
  Existing existing = Existing::refuse;
  std::function<std::chrono::steady_clock::time_point()> clock = {};  ///< for every_time; default: the steady clock
};

/// Saves everything that a run consists of, and brings it back bit for bit.
///
///     CheckpointManager checkpoints({.directory = "runs/mnist"});
///     Progress at = checkpoints.restore(model, optimizer).value_or(Progress{});
///     checkpoints.save(at, model, optimizer);          // any number of further modules, optimizers, policies
///
/// **Safety.** Once the first save is durable the directory always holds a complete checkpoint: a file is written under
/// another name, made durable, renamed, and only then are older ones removed. Every tensor and the header have a hash. What
/// is written is the state at the call, whatever the next step does. In the background one write is in flight at most:
/// save() waits for the one before. A failed write surfaces at the next save() or wait(); the older files stay.
///
/// **Cost.** save() copies the state into host memory, which is kept: the size of the model with its optimizer (three times
/// the weights for Adam). CUDA tensors go through pinned memory with one sync per device (not yet run on a GPU).
///
/// **Content.** One .safetensors file `checkpoint-<number>.safetensors`, which other tools open. Tensors: `model/<name>`
/// (parameters and buffers; `model.1/...` of a second module); `optimizer/<parameter>/exp_avg` and the like, where
/// `<parameter>` is its name with its model, `model/fc.weight`; `state/<section>/<name>` of policies; `rng/random.cpu`;
/// `gradient/<parameter>` inside an unfinished window (when an argument says `pending()`); `parameter/<place>` for
/// parameters of the optimizer that are in no module. Metadata: `progress.epoch` ...; `frugal.version`,
/// `libtorch.version`; `measured/<parameter>`, the tensor that the metric belongs to where it is not the parameter's own (an
/// average); `optimizer/class`, `optimizer/group.0/lr` ...; values of sections, with their type, as
/// `state/stopping/best` = `double:0.5`. AmpPolicy's section holds the precision.
///
/// Optimizers: AdamW, Adam, SGD, Adagrad, RMSprop, any number of groups. A class of your own, optimizers included, takes
/// part with `void save(auto& out) const` and `void load(auto& in)`. Its section is named by `static constexpr
/// std::string_view state_name`, else by its role; repeats get `.1`, `.2`.
///
/// One manager at a time writes into a directory. Movable; one that was moved from is an error to use. Not for several
/// threads at once.
template <class Storage = LocalFiles>
class CheckpointManager {
 public:
  static constexpr Role role = Role::checkpointing;
  /// What a Trainer keeps of the random numbers of an earlier moment.
  using RandomState = detail::RandomState;

  /// Touches nothing on disk. Throws on an option outside of its range.
  explicit CheckpointManager(CheckpointManagerOptions options, Storage storage = {})
      : options_(std::move(options)), last_time_(now()) {
    const auto& o = options_;
    TORCH_CHECK(o.keep_last >= 1, "CheckpointManager: keep_last is ", o.keep_last, ". Keep at least 1.");
    TORCH_CHECK(o.keep_best >= 0, "CheckpointManager: keep_best is ", o.keep_best, ". 0 keeps none for its metric.");
    TORCH_CHECK(
        o.every_epochs >= 0 && o.every_steps >= 0 && o.every_time.count() >= 0,
        "CheckpointManager: every_epochs, every_steps and every_time must not be negative. 0 switches one off.");
    if (o.directory.empty()) return;
    off_ = false;
    const detail::Retention retention{.keep_last = o.keep_last, .keep_best = o.keep_best, .goal = o.goal};
    store_ = std::make_unique<Store>(o.directory, retention, std::move(storage));
  }

  /// Saves; returns when the state is copied, or durable with Writing::blocking. `stateful`: modules, optimizers, and
  /// objects with save(out) and load(in). Throws the error of the write before, if it failed: call again to save anyway.
  /// The first call throws when another manager writes into the directory, or see Existing.
  void save(const Progress& progress, auto& model, auto& optimizer, auto&... stateful) {
    constexpr bool complete =
        detail::all_have_state<std::remove_reference_t<decltype(model)>, std::remove_reference_t<decltype(optimizer)>,
                               std::remove_reference_t<decltype(stateful)>...>();
    if constexpr (complete) {
      if (!on()) return;
      wait();
      claim();
      store_->write(detail::collect(progress, model, optimizer, stateful...), options_.writing == Writing::background);
      saved(progress);
    }
  }

  /// Brings back the newest valid checkpoint, and says where it stood; nullopt: there is none, nothing was changed. Pass
  /// what was passed to save(); modules, optimizers and policies of one role in the same order.
  ///
  /// A damaged file is passed over with a warning. Throws, and changes nothing, when all are damaged and when the
  /// checkpoint does not fit: names, shapes and dtypes of the model, class, groups and options of the optimizer; a tensor of
  /// the model that cannot take its values, or two that share memory here and differ there. An object that the checkpoint
  /// does not know stays as constructed, and one that only the checkpoint knows is left out, with a warning each. Gradients
  /// of parameters are set to those of the unfinished window, else to none.
  std::optional<Progress> restore(auto& model, auto& optimizer, auto&... stateful) {
    constexpr bool complete =
        detail::all_have_state<std::remove_reference_t<decltype(model)>, std::remove_reference_t<decltype(optimizer)>,
                               std::remove_reference_t<decltype(stateful)>...>();
    if constexpr (complete) {
      if (!on()) return std::nullopt;
      store_->settle();
      const auto found = store_->newest();
      if (!found) return std::nullopt;
      const auto restored = [&] { return detail::restore_all(found->state, model, optimizer, stateful...); };
      saved(naming(found->path, restored));
      return last_;
    }
    return std::nullopt;
  }

  /// Brings back parameters and buffers of the best checkpoint that is kept: that of the best finite metric that belongs to
  /// its weights (`metric_step == step`), of two equal ones the older. They are the weights that the metric was measured on:
  /// the averages of an Averager that was passed to save() where they were in the model since the last step, as they are
  /// when a Trainer validates. What a Trainer saved after a forward pass since the check is no candidate if the model has
  /// buffers, which that pass may have moved (in a loop of your own: save before it). False: no such checkpoint, nothing was changed. Throws, and changes nothing, as restore() does.
  bool restore_best(auto& model) {
    constexpr bool is_module = detail::ModuleLike<std::remove_reference_t<decltype(model)>>;
    static_assert(is_module,
                  "CheckpointManager: restore_best() takes a module. Pass a Module, a ModuleHolder or a shared_ptr.");
    if (!on()) return false;
    store_->settle();
    const auto found = store_->best();
    if (!found) return false;
    if constexpr (is_module)
      naming(found->path, [&] {
        detail::restore_measured(found->state, model);
        return true;
      });
    return true;
  }

  /// Whether the options ask for a save now. For a loop that asks after every finished window and every check; one that
  /// asks less often is told what it missed. Epochs count when `micro_batch` is 0. Never true twice for one progress.
  bool due(const Progress& at) const {
    if (!on() || same_place(at, last_)) return false;
    const auto passed = [](std::int64_t every, std::int64_t before, std::int64_t current) {
      return every > 0 && current / every > before / every;
    };
    if (at.micro_batch == 0 && passed(options_.every_epochs, last_.epoch, at.epoch)) return true;
    if (passed(options_.every_steps, last_.step, at.step)) return true;
    return options_.every_time.count() > 0 && now() - last_time_ >= options_.every_time;
  }

  /// Until the write in flight is durable; throws its error, once.
  void wait() {
    if (on()) store_->wait();
  }

  /// Takes the directory now rather than at the first save(), so that its errors come before the first epoch and not after
  /// it: another manager, a used directory, no permission.
  void claim() {
    if (!on()) return;
    const std::int64_t newest = store_->lock();
    if (newest == 0) return;
    TORCH_CHECK(options_.existing != Existing::refuse, "CheckpointManager: '", options_.directory.string(),
                "' holds checkpoints of another run (the newest is number ", newest,
                "). Continue it by restore() or "
                "Trainer::resume(), use another directory, or say .existing = Existing::append or Existing::discard.");
    store_->take_over(options_.existing == Existing::append);
  }

  /// A new run begins: triggers count from its start, and the files in the directory are another run's (see Existing).
  void reset() {
    if (on()) store_->disown();
    saved({});
  }

  /// The checkpoints in the directory, newest last. `valid` says that size and header are right; restore() verifies all.
  std::vector<CheckpointInfo> list() const {
    if (!on()) return {};
    store_->settle();
    return detail::list_checkpoints(options_.directory);
  }

 private:
  using Store = detail::CheckpointStore<Storage>;
  using TimePoint = std::chrono::steady_clock::time_point;

  // False: switched off. A manager that was moved from would save nothing, and nobody would notice.
  bool on() const {
    TORCH_CHECK(store_ || off_,
                "CheckpointManager: this one was moved from. Use the one that it was moved to: "
                "trainer.get<CheckpointManager<>>().");
    return !off_;
  }
  TimePoint now() const { return options_.clock ? options_.clock() : std::chrono::steady_clock::now(); }
  void saved(const Progress& progress) { last_ = progress, last_time_ = now(); }
  static bool same_place(const Progress& one, const Progress& other) {
    return one.epoch == other.epoch && one.micro_batch == other.micro_batch && one.step == other.step &&
           one.skipped == other.skipped && one.samples == other.samples;
  }
  // An error about a checkpoint says which file it is about.
  static auto naming(const std::filesystem::path& path, auto&& call) {
    try {
      return call();
    } catch (c10::Error& error) {
      error.add_context("checkpoint '" + path.string() + "'");
      throw;
    }
  }

  CheckpointManagerOptions options_;
  Progress last_;                 // saved or restored
  TimePoint last_time_;           // when
  bool off_ = true;               // no directory
  std::unique_ptr<Store> store_;  // null: off, or moved from
};

CheckpointManager(CheckpointManagerOptions) -> CheckpointManager<LocalFiles>;
template <class Storage>
CheckpointManager(CheckpointManagerOptions, Storage) -> CheckpointManager<Storage>;

}  // namespace frugal::inline v0
