#include "support/catch.hpp"
#include "support/states.hpp"
#include "support/temporary_directory.hpp"

#include <frugal/averager.hpp>
#include <frugal/batches.hpp>
#include <frugal/channels_last.hpp>
#include <frugal/checkpoint_manager.hpp>
#include <frugal/early_stopper.hpp>
#include <frugal/fused_step.hpp>
#include <frugal/grad_accumulator.hpp>
#include <frugal/state_guard.hpp>
#include <frugal/trainer.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using namespace frugal;

namespace {

// One channel in, a strided, a depthwise and a 1x1 convolution: each has dimensions of size 1, where strides are
// ambiguous.
struct ImageNetImpl : torch::nn::Module {
  ImageNetImpl() {
    using namespace torch::nn;
    layers = register_module(
        "layers", Sequential(Conv2d(Conv2dOptions(3, 8, 3).padding(1)), BatchNorm2d(8), ReLU(),
                             Conv2d(Conv2dOptions(8, 8, 3).groups(8).padding(1)), Conv2d(Conv2dOptions(8, 6, 1)),
                             ReLU(), Conv2d(Conv2dOptions(6, 4, 3).stride(2)), Flatten(), Linear(4 * 3 * 3, 3)));
  }
  torch::Tensor forward(const torch::Tensor& images) { return layers->forward(images); }
  torch::nn::Sequential layers = nullptr;
};
TORCH_MODULE(ImageNet);

ImageNet make_net() {
  torch::manual_seed(3);
  return {};
}

torch::Tensor images_of(std::int64_t count, std::int64_t channels = 3) {
  return torch::sin(torch::arange(count * channels * 64).to(torch::kFloat).mul(1.7)).reshape({count, channels, 8, 8});
}
torch::Tensor labels_of(const torch::Tensor& images) {
  return images.sum({1, 2, 3}).abs().to(torch::kLong).remainder(3);
}

constexpr auto plain = at::MemoryFormat::Contiguous;
constexpr auto last = at::MemoryFormat::ChannelsLast;
at::MemoryFormat order_of(const torch::Tensor& tensor) { return tensor.suggest_memory_format(); }

// Whether all of the memory is used, and in that order: convolutions copy anything else.
bool lies(const torch::Tensor& tensor, at::MemoryFormat format) {
  return order_of(tensor) == format && tensor.is_contiguous(format);
}

std::vector<torch::Tensor> weights_of_4(const torch::nn::Module& module) {
  std::vector<torch::Tensor> found;
  for (const auto& parameter : module.parameters())
    if (parameter.dim() == 4) found.push_back(parameter);
  return found;
}
bool all_lie(const std::vector<torch::Tensor>& tensors, at::MemoryFormat format) {
  for (const auto& tensor : tensors)
    if (!lies(tensor, format)) return false;
  return !tensors.empty();
}

torch::optim::AdamW make_optimizer(ImageNet& net) {
  return torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(0.01));
}

torch::Tensor loss_of(ImageNet& net, const torch::Tensor& images) {
  return torch::cross_entropy_loss(net(images), labels_of(images));
}
void step(ImageNet& net, torch::optim::Optimizer& optimizer, const torch::Tensor& images) {
  loss_of(net, images).backward();
  optimizer.step();
  optimizer.zero_grad();
}

const torch::optim::AdamWParamState& state_of(const torch::optim::Optimizer& optimizer, const torch::Tensor& weight) {
  return static_cast<const torch::optim::AdamWParamState&>(*optimizer.state().at(weight.unsafeGetTensorImpl()));
}

}  // namespace

TEST_CASE("the weights of a convolution model are ordered, as the same objects with the same bits") {
  ImageNet net = make_net();
  const auto parameters = net->parameters();
  std::vector<torch::Tensor> before;
  std::vector<const void*> memory;
  for (const auto& parameter : parameters) {
    before.push_back(parameter.detach().clone());
    memory.push_back(parameter.data_ptr());
  }
  REQUIRE(all_lie(weights_of_4(*net), plain));
  CHECK(to_channels_last(net));

  CHECK(all_lie(weights_of_4(*net), last));
  REQUIRE(net->parameters().size() == parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    CHECK(net->parameters()[i].is_same(parameters[i]));
    CHECK(same_bits(parameters[i], before[i]));
    CHECK(parameters[i].requires_grad());
    CHECK(parameters[i].is_leaf());
    if (parameters[i].dim() != 4) CHECK(parameters[i].data_ptr() == memory[i]);  // left alone
  }

  memory.clear();
  for (const auto& weight : weights_of_4(*net)) memory.push_back(weight.data_ptr());
  CHECK(to_channels_last(*net));  // a Module, and for the second time
  for (std::size_t i = 0; i < memory.size(); ++i) CHECK(weights_of_4(*net)[i].data_ptr() == memory[i]);
}

TEST_CASE("volumes are ordered too, buffers as well, and a shared_ptr is a model") {
  auto module = std::make_shared<torch::nn::Conv3dImpl>(torch::nn::Conv3dOptions(3, 4, 3));
  const auto buffer = module->register_buffer("mean", torch::rand({2, 3, 4, 5}));
  const auto mask = module->register_buffer("mask", torch::ones({2, 3, 4, 5}, torch::kLong));
  CHECK(to_channels_last(module));
  CHECK(lies(module->weight, at::MemoryFormat::ChannelsLast3d));
  CHECK(lies(buffer, last));
  CHECK(lies(mask, plain));
  const auto volumes = channels_last(torch::rand({2, 3, 4, 5, 6}));
  CHECK(lies(volumes, at::MemoryFormat::ChannelsLast3d));
  CHECK(lies(module->forward(volumes), at::MemoryFormat::ChannelsLast3d));
}

TEST_CASE("channels_last() of a tensor: the same values, a copy only where one is needed") {
  const auto images = images_of(4), ordered = channels_last(images);
  CHECK(lies(ordered, last));
  CHECK(same_bits(ordered, images));
  CHECK(lies(images, plain));
  CHECK(channels_last(ordered).is_same(ordered));
  CHECK(lies(channels_last(images_of(4, 1)), last));  // one channel: told apart by strides of size-1 dimensions only
  CHECK(lies(channels_last(torch::rand({4, 3, 1, 1})), last));
  for (const auto& other : {torch::rand({4, 5}), torch::rand({4, 5, 6}), torch::tensor(1), torch::Tensor()})
    CHECK(channels_last(other).is_same(other));
  const auto sparse = images.to_sparse();
  CHECK(channels_last(sparse).is_same(sparse));
}

TEST_CASE("a model without weights of four dimensions: nothing happens, to nothing") {
  torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::Conv1d(torch::nn::Conv1dOptions(2, 2, 3)));
  const auto images = images_of(6);
  Batches batches(images, labels_of(images), {.batch_size = 6, .order = Order::sequential});
  Batches fetched(6, [&](torch::Tensor) { return images; }, {.batch_size = 6});
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  CHECK_FALSE(to_channels_last(model, batches, fetched, optimizer));
  for (auto& batch : batches.epoch(0)) CHECK(batch.inputs.data_ptr() == images.data_ptr());
  for (auto& batch : fetched.epoch(0)) CHECK(batch.is_same(images));
}

TEST_CASE("every batch of images comes channels-last, with the same bits and the same fingerprint") {
  ImageNet net = make_net();
  for (const std::int64_t channels : {1, 3})
    for (const Order order : {Order::shuffled, Order::sequential})
      for (const std::int64_t prefetch : {0, 2}) {
        INFO(channels << " channels, " << (order == Order::shuffled ? "shuffled" : "sequential") << ", prefetch "
                      << prefetch);
        const auto images = images_of(11, channels), masks = images.mul(2);
        const auto fetch = [&](torch::Tensor indices) {
          return Batch{images.index_select(0, indices), masks.index_select(0, indices)};
        };
        const BatchesOptions options{
            .batch_size = 4, .micro_batch = 3, .order = order, .seed = 5, .prefetch = prefetch};
        const Batches reference(images, masks, options);
        Batches batches(images, masks, options);
        Batches fetched(11, fetch, options);
        const auto copy = fetched;
        CHECK(to_channels_last(net, batches, fetched));
        CHECK(batches.fingerprint() == reference.fingerprint());
        const auto compare = [&](const auto& ordered) {
          for (const std::int64_t consumed : {0, 2}) {
            auto expected = reference.epoch(1, consumed).begin();
            int count = 0;
            for (auto& batch : ordered.epoch(1, consumed)) {
              CHECK(lies(batch.inputs, last));
              CHECK(lies(batch.targets, last));
              CHECK(same_bits(batch.inputs, expected->inputs));
              CHECK(same_bits(batch.targets, expected->targets));
              CHECK(lies(expected->inputs, plain));
              ++expected, ++count;
            }
            CHECK(count == reference.size() - consumed);
          }
        };
        compare(batches);
        compare(fetched);
        compare(copy);
      }
}

TEST_CASE("batches keep the order of the images that they are made of, by copying whole rows") {
  const auto images = channels_last(images_of(10));
  const Batches batches(images, labels_of(images), {.batch_size = 4});
  for (auto& batch : batches.epoch(0)) {
    CHECK(lies(batch.inputs, last));
    CHECK(order_of(batch.inputs.narrow(0, 0, 1)) == last);
  }
  const auto volumes = channels_last(torch::rand({6, 3, 2, 4, 5}));
  for (auto& batch : Batches(volumes, volumes, {.batch_size = 4}).epoch(0))
    CHECK(lies(batch.inputs, at::MemoryFormat::ChannelsLast3d));
  // a window of larger images: as many dimensions, strides with gaps
  const auto window = images.narrow(2, 1, 5);
  const Batches windows(window, labels_of(images), {.batch_size = 10, .order = Order::shuffled, .seed = 2});
  const Batches same(window.contiguous(), labels_of(images), {.batch_size = 10, .order = Order::shuffled, .seed = 2});
  for (auto& batch : windows.epoch(0)) {
    CHECK(lies(batch.inputs, last));
    CHECK(same_bits(batch.inputs, same.epoch(0).begin()->inputs));
  }
}

TEST_CASE("the order survives the way to a device and to another type") {
  ImageNet net = make_net();
  const auto images = images_of(6);
  Batches batches(images, labels_of(images), {.batch_size = 4, .device = at::kMeta});
  Batches fetched(6, [&](torch::Tensor indices) { return images.index_select(0, indices); },
                  {.batch_size = 4, .device = at::kMeta});
  CHECK(to_channels_last(net, batches, fetched));
  for (auto& batch : batches.epoch(0)) CHECK((batch.inputs.is_meta() && lies(batch.inputs, last)));
  for (auto& batch : fetched.epoch(0)) CHECK((batch.is_meta() && lies(batch, last)));
  net->to(torch::kDouble);
  CHECK(all_lie(weights_of_4(*net), last));
  for (const auto& weight : weights_of_4(*net)) {
    CHECK(lies(weight.to(torch::kMeta), last));
    CHECK(lies(weight.to(torch::kHalf), last));  // as autocast does
    CHECK(lies(weight.detach().clone(), last));
  }
}

TEST_CASE("training goes the same way, in the order throughout, and through fused kernels") {
  ImageNet reference = make_net(), net = make_net();
  // not Adam, which makes whole steps of the rounding in gradients that are 0, as those of biases before a norm
  torch::optim::SGD of_reference(reference->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto images = images_of(12);
  FusedStep plain_fused, fused;
  CHECK(to_channels_last(net));
  CHECK(lies(net->layers->ptr<torch::nn::Conv2dImpl>(0)->forward(channels_last(images)), last));
  for (int i = 0; i < 4; ++i) {
    loss_of(reference, images).backward();
    loss_of(net, channels_last(images)).backward();
    for (const auto& weight : weights_of_4(*net)) CHECK(weight.grad().is_contiguous(last));
    plain_fused.step(of_reference), fused.step(optimizer);
    CHECK(fused.reason() == "fused kernels");
    of_reference.zero_grad(), optimizer.zero_grad();
  }
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    CHECK(torch::allclose(net->parameters()[i], reference->parameters()[i], 1e-3, 1e-4));
}

TEST_CASE("gradients and optimizer state that are there already take the order of their weights") {
  ImageNet net = make_net(), left = make_net();
  auto optimizer = make_optimizer(net), of_left = make_optimizer(left);
  const auto images = images_of(12);
  step(net, optimizer, images), step(left, of_left, images);
  loss_of(net, images).backward(), loss_of(left, images).backward();
  const auto expected = stored(net, optimizer);
  CHECK(to_channels_last(net, optimizer));
  CHECK(to_channels_last(left));
  CHECK(difference(stored(net, optimizer), expected).empty());
  for (const auto& weight : weights_of_4(*net)) {
    CHECK(lies(weight.grad(), last));
    CHECK(lies(state_of(optimizer, weight).exp_avg(), last));
    CHECK(lies(state_of(optimizer, weight).exp_avg_sq(), last));
  }
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    CHECK(same_bits(net->parameters()[i].grad(), left->parameters()[i].grad()));

  FusedStep fused, falls_back;
  fused.step(optimizer), falls_back.step(of_left);
  CHECK(fused.reason() == "fused kernels");
  CHECK_THAT(falls_back.reason(), ContainsSubstring("its state differ in strides"));  // right all the same
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    CHECK(torch::allclose(net->parameters()[i], left->parameters()[i], 1e-4, 1e-6));
}

TEST_CASE("weights that share their memory keep it") {
  struct Shared : torch::nn::Module {
    torch::Tensor flat = torch::rand({2 * 8 * 4 * 3 * 3});
    torch::Tensor left = register_parameter("left", flat.narrow(0, 0, 288).view({8, 4, 3, 3}));
    torch::Tensor right = register_parameter("right", flat.narrow(0, 288, 288).view({8, 4, 3, 3}));
    torch::Tensor one = register_parameter("one", torch::rand({8, 4, 3, 3}));
    torch::Tensor other = register_parameter("other", one.detach());
    torch::Tensor outside = torch::rand({300});
    torch::Tensor part = register_parameter("part", outside.narrow(0, 0, 288).view({8, 4, 3, 3}));
    torch::Tensor own = register_parameter("own", torch::rand({8, 4, 3, 3}));
    torch::Tensor again = register_parameter("again", own);  // tied: one object
  } model;
  const auto flat = model.flat.clone();
  CHECK(to_channels_last(model));
  CHECK(model.left.data_ptr() == model.flat.data_ptr());
  CHECK(model.right.is_alias_of(model.flat));
  CHECK(model.part.is_alias_of(model.outside));
  CHECK(model.one.data_ptr() == model.other.data_ptr());
  CHECK(lies(model.left, plain));
  CHECK(lies(model.one, plain));
  CHECK(lies(model.own, last));
  CHECK(model.again.is_same(model.own));
  CHECK(torch::equal(model.flat, flat));
}

TEST_CASE("checkpoints go from either order into either, and leave the order as it is") {
  const auto images = images_of(12);
  for (const bool written_last : {true, false})
    for (const bool read_last : {true, false}) {
      INFO((written_last ? "channels-last" : "plain") << " into " << (read_last ? "channels-last" : "plain"));
      const TemporaryDirectory directory;
      CheckpointManager checkpoints({.directory = directory / "run", .writing = Writing::blocking});
      ImageNet net = make_net();
      auto optimizer = make_optimizer(net);
      if (written_last) to_channels_last(net);
      GradAccumulator accumulator(2);
      step(net, optimizer, images);
      CHECK_FALSE(accumulator.backward(loss_of(net, images), 12));
      checkpoints.save({}, net, optimizer, accumulator);

      ImageNet copy;  // with other weights
      auto of_copy = make_optimizer(copy);
      if (read_last) to_channels_last(copy);
      GradAccumulator its_accumulator(2);
      CHECK(checkpoints.restore(copy, of_copy, its_accumulator).has_value());
      CHECK(difference(stored(copy, of_copy, its_accumulator), stored(net, optimizer, accumulator)).empty());
      CHECK(all_lie(weights_of_4(*copy), read_last ? last : plain));
      for (const auto& weight : weights_of_4(*copy)) {
        CHECK(lies(state_of(of_copy, weight).exp_avg(), read_last ? last : plain));
        CHECK(lies(weight.grad(), read_last ? last : plain));
      }
      FusedStep fused;
      fused.step(of_copy);
      CHECK(fused.reason() == "fused kernels");
    }
}

TEST_CASE("StateGuard: a trial on a channels-last model leaves no trace, the order included") {
  ImageNet net = make_net();
  auto optimizer = make_optimizer(net);
  const auto images = images_of(12);
  to_channels_last(net);
  step(net, optimizer, channels_last(images));
  loss_of(net, channels_last(images)).backward();
  const auto before = stored(net, optimizer);
  std::vector<const void*> memory;
  for (const auto& weight : weights_of_4(*net)) memory.push_back(weight.data_ptr());
  {
    const StateGuard guard(net, optimizer);
    for (int i = 0; i < 3; ++i) step(net, optimizer, channels_last(images));
  }
  CHECK(difference(stored(net, optimizer), before).empty());
  CHECK(all_lie(weights_of_4(*net), last));
  for (std::size_t i = 0; i < memory.size(); ++i) {
    const auto weight = weights_of_4(*net)[i];
    CHECK(weight.data_ptr() == memory[i]);
    CHECK(lies(weight.grad(), last));
    CHECK(lies(state_of(optimizer, weight).exp_avg(), last));
  }
}

TEST_CASE("StateGuard: the order itself is undone, when it was changed inside") {
  ImageNet net = make_net();
  auto optimizer = make_optimizer(net);
  const auto images = images_of(12);
  step(net, optimizer, images);
  loss_of(net, images).backward();
  const auto before = stored(net, optimizer);
  {
    const StateGuard guard(net, optimizer);
    CHECK(to_channels_last(net, optimizer));
    for (int i = 0; i < 3; ++i) step(net, optimizer, channels_last(images));
  }
  CHECK(difference(stored(net, optimizer), before).empty());
  CHECK(all_lie(weights_of_4(*net), plain));
  for (const auto& weight : weights_of_4(*net)) {
    CHECK(lies(weight.grad(), plain));
    CHECK(lies(state_of(optimizer, weight).exp_avg(), plain));
  }
}

TEST_CASE("Averager: the average of a model that changes its order goes on, in the order of the model") {
  ImageNet net = make_net(), reference = make_net();
  Averager average({.decay = 0.5}), of_reference({.decay = 0.5});
  const auto change = [](ImageNet& one) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : one->parameters()) parameter.mul_(1.0 / 3).add_(0.1);
  };
  average.update(net), of_reference.update(reference);
  change(net), change(reference);
  to_channels_last(net);
  for (int i = 0; i < 3; ++i) {
    average.update(net), of_reference.update(reference);
    change(net), change(reference);
  }
  frugal::detail::State state;
  frugal::detail::StateOut out(state, "average");
  average.save(out);
  for (const auto& [name, tensor] : state.tensors)
    if (tensor.dim() == 4) CHECK(lies(tensor, last));
  const auto weights = stored(net);
  average.swap(net), of_reference.swap(reference);
  for (std::size_t i = 0; i < net->parameters().size(); ++i)
    CHECK(torch::allclose(net->parameters()[i], reference->parameters()[i], 1e-5, 1e-6));
  CHECK(all_lie(weights_of_4(*net), last));
  average.swap(net);
  CHECK(difference(stored(net), weights).empty());
}

namespace {

struct Interruption {
  static constexpr Role role = Role::interruption;
  const bool* asked;
  bool requested() const { return *asked; }
};

// What a run leaves that is interrupted every `every` micro-batches (0: never) and continued by new objects.
frugal::detail::State train(int every, const std::filesystem::path& directory) {
  const auto images = images_of(26);
  for (unsigned attempt = 0; attempt < 100; ++attempt) {
    torch::manual_seed(attempt == 0 ? 3 : 1000 + attempt);
    ImageNet net;
    auto optimizer = make_optimizer(net);
    Batches batches(images, labels_of(images), {.batch_size = 12, .micro_batch = 4, .seed = 11});
    CHECK(to_channels_last(net, batches));
    bool asked = false;
    int left = every;
    const auto loss = [&](ImageNet& model, const Batch& batch) {
      CHECK(lies(batch.inputs, last));
      asked = --left == 0;
      return torch::cross_entropy_loss(model(batch.inputs), batch.targets);
    };
    Trainer trainer{net,
                    optimizer,
                    loss,
                    GradAccumulator({.steps = batches.steps()}),
                    FusedStep{},
                    Averager({.decay = 0.9}),
                    EarlyStopper({.patience = 5}),
                    CheckpointManager({.directory = directory}),
                    Interruption{&asked}};
    CHECK(trainer.resume() == (attempt > 0));
    const auto validate = [&] { return loss_of(net, channels_last(images)).item<double>(); };
    const RunReport report = trainer.fit(batches, validate, {.epochs = 3});
    const std::string how = trainer.get<FusedStep>().reason();
    CHECK((how == "fused kernels" || how == "no step yet"));
    CHECK(all_lie(weights_of_4(*net), last));
    if (report.reason != StopReason::preempted) return stored(net, optimizer, trainer.get<Averager>());
  }
  throw std::runtime_error("the run never ends");
}

}  // namespace

TEST_CASE("an interrupted channels-last run ends bit for bit where an undisturbed one does") {
  const TemporaryDirectory directory;
  const auto expected = train(0, directory / "undisturbed");
  for (const int every : {1, 4, 7}) {
    INFO("interrupted every " << every << " micro-batches");
    CHECK(difference(train(every, directory / std::to_string(every)), expected).empty());
  }
}
