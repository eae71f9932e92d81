// What the composition promises about size and shape, with parts of plain C++. Passes if it compiles.
#include <frugal/early_stopper.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/observers.hpp>
#include <frugal/policy.hpp>
#include <frugal/schedule.hpp>
#include <frugal/trainer.hpp>

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>

namespace {

using namespace frugal;

struct Model {};
struct Optimizer {
  void step() {}
  void zero_grad() {}
};
struct Loss {
  double operator()(Model&, const int&) const { return 0; }
};
template <class... Policies>
using With = Trainer<Model, Optimizer, Loss, Policies...>;

// Two references, where the run stands, the last loss and whether it was read, two flags of the loop: nothing else.
struct Bare {
  Model& model;
  Optimizer& optimizer;
  Progress progress;
  struct {
    double last;
    bool unread;
  } loss;
  bool begun, moved;
};
static_assert(sizeof(With<>) == sizeof(Bare));
static_assert(sizeof(Progress) == 8 * sizeof(double));

// A policy costs its own size, in any company; one without state costs nothing.
constexpr std::size_t rounded(std::size_t bytes) {
  return (bytes + alignof(double) - 1) / alignof(double) * alignof(double);
}
static_assert(sizeof(With<EarlyStopper>) <= sizeof(Bare) + rounded(sizeof(EarlyStopper)));
static_assert(sizeof(With<Schedule>) <= sizeof(Bare) + rounded(sizeof(Schedule)));
static_assert(sizeof(With<EarlyStopper, Schedule>) <=
              sizeof(Bare) + rounded(sizeof(EarlyStopper)) + rounded(sizeof(Schedule)));

constexpr auto on_epoch = [](const Progress&) {};
constexpr auto on_gradients = [](Model&) {};
using Epochs = OnEpoch<std::remove_const_t<decltype(on_epoch)>>;
using Gradients = OnGradients<std::remove_const_t<decltype(on_gradients)>>;
static_assert(std::is_empty_v<Epochs> && std::is_empty_v<Gradients>);
static_assert(sizeof(With<Epochs>) == sizeof(With<>));
static_assert(sizeof(With<Epochs, Gradients>) == sizeof(With<>));
static_assert(sizeof(With<Gradients, EarlyStopper, Epochs>) == sizeof(With<EarlyStopper>));

// Every stand-in of an absent policy is stateless, and plays the role that it stands in for.
template <Role R>
constexpr bool stands_in = [] {
  using StandIn = decltype(detail::stand_in<R>());
  return std::is_empty_v<StandIn> && std::is_trivially_default_constructible_v<StandIn> && StandIn::role == R;
}();
static_assert(stands_in<Role::precision> && stands_in<Role::accumulation> && stands_in<Role::clipping>);
static_assert(stands_in<Role::update> && stands_in<Role::schedule> && stands_in<Role::averaging>);
static_assert(stands_in<Role::stopping> && stands_in<Role::checkpointing> && stands_in<Role::interruption>);
static_assert(std::is_empty_v<detail::FullPrecision::Guard>);
static_assert(std::is_empty_v<detail::NoWeights> && std::is_empty_v<detail::Nothing>);
// Their answers are known when the loop is compiled, so that whatever hangs on them folds away.
static_assert(detail::EveryBatch::factor() == 1.0 && !detail::EveryBatch::pending());
static_assert(!detail::NoAverage::averaging() && detail::NeverStop::reason() == StopReason::none);
static_assert(!detail::NoCheckpoints::due(Progress{}) && !detail::NeverInterrupted::requested());

// Policies are found by role, wherever they stand.
template <class... Types>
constexpr bool found = [] {
  using Pack = std::tuple<Types...>;
  return std::is_same_v<std::tuple_element_t<detail::find<Role::accumulation, Types...>, Pack>, GradAccumulator> &&
         std::is_same_v<std::tuple_element_t<detail::find<Role::stopping, Types...>, Pack>, EarlyStopper> &&
         detail::find<Role::clipping, Types...> == sizeof...(Types);
}();
static_assert(found<GradAccumulator, EarlyStopper, Epochs>);
static_assert(found<Epochs, EarlyStopper, GradAccumulator>);
static_assert(found<EarlyStopper, Epochs, GradAccumulator, Gradients>);
static_assert(detail::count<Role::observer, Epochs, EarlyStopper, Gradients> == 2);

// The roles are part of the interface: a policy's place in the loop.
static_assert(GradAccumulator::role == Role::accumulation);
static_assert(EarlyStopper::role == Role::stopping);
static_assert(Schedule::role == Role::schedule && ReduceOnPlateau::role == Role::schedule);
static_assert(Epochs::role == Role::observer && Gradients::role == Role::observer);
static_assert(OnStep<int (*)(const Progress&)>::role == Role::observer && OnStep<int (*)(const Progress&)>::reads_loss);

// The concepts tell policies from what only looks like one.
struct NamesNoRole {
  Verdict observe(double) { return Verdict::waiting; }
  StopReason reason() const { return StopReason::none; }
};
struct AnswersWithBool : NamesNoRole {
  static constexpr Role role = Role::stopping;
  bool observe(double) { return false; }
};
static_assert(StoppingPolicy<EarlyStopper> && !StoppingPolicy<NamesNoRole> && !StoppingPolicy<AnswersWithBool>);
static_assert(Stateful<GradAccumulator> && Stateful<EarlyStopper> && Stateful<Schedule> && Stateful<ReduceOnPlateau>);
static_assert(!Stateful<Epochs>);

// The Trainer moves its policies in.
template <class Type>
constexpr bool movable = std::is_move_constructible_v<Type> && std::is_move_assignable_v<Type>;
static_assert(movable<GradAccumulator> && movable<EarlyStopper> && movable<Schedule> && movable<ReduceOnPlateau>);

// A weight of any arithmetic type, without a conversion that loses anything silently.
static_assert(std::is_same_v<decltype(Weighted(Model{}, std::int64_t{3})), Weighted<Model>>);
static_assert(std::is_same_v<decltype(Weighted(Model{}, 3u)), Weighted<Model>>);
static_assert(!std::is_constructible_v<Weighted<Model>, Model, Model>);

}  // namespace
