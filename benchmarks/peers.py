#!/usr/bin/env python3
"""Holds one training loop of the Python world to be timed beside ours, and serves it over stdin and stdout.

    peers.py --folder FOLDER --peer eager --precision bf16 --threads 2 --device cpu

FOLDER has the network, the initial weights and the data, exported by our side (meta.json says what is where). One request
a line, one JSON object a line as the answer: `check N FILE`, `run N`, `memory`. Everything else that is printed goes to
stderr. Each peer is written in the fastest way that its documentation names: fused AdamW, gradients set to None, no value
read back between two steps. Global switches of torch (TF32, cudnn.benchmark) keep their defaults, as on our side.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import math
import os
import pathlib
import platform
import sys
import time
import warnings


class Streams:
    """stdin and stdout for the protocol alone: descriptors 0 and 1 become nothing and stderr, for libraries and children too."""

    def __init__(self):
        self.requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self.answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)

    def answer(self, what):
        self.answers.write(json.dumps(what) + "\n")
        self.answers.flush()

    def refuse(self, why):
        self.answer({"error": why})
        sys.exit(1)


streams = Streams() if __name__ == "__main__" else None  # before torch, whose libraries may print while they are loaded

try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except ImportError as missing:
    if streams is None:
        raise
    streams.refuse(f"torch cannot be imported: {missing}")


# ---- the networks of models.hpp, with their parameters in the same order -----------------------------------------------


def mlp(sizes):
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class OneWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return inputs * self.weight


def convolution(inputs, outputs, size, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


class ResidualBlock(nn.Module):
    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:  # the stride is in the 3 x 3
            layers = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            layers = [(inputs, width, 3, stride), (width, width, 3, 1)]
        for number, layer in enumerate(layers, 1):
            self.add_module(f"conv{number}", convolution(*layer))
            self.add_module(f"norm{number}", nn.BatchNorm2d(layer[1]))
        self.last = bottleneck
        self.shortcut = None
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        if self.last:
            y = self.norm3(self.conv3(F.relu(y, inplace=True)))
        y += x if self.shortcut is None else self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    def __init__(self, blocks, bottleneck, classes, stem):
        super().__init__()
        self.stem = convolution(3, 64, stem, 1 if stem == 3 else 2)
        self.stem_norm = nn.BatchNorm2d(64)
        self.pool = nn.Identity() if stem == 3 else nn.MaxPool2d(3, 2, 1)
        layers, inputs = [], 64
        for stage, count in enumerate(blocks):
            for i in range(count):
                layers.append(ResidualBlock(inputs, 64 << stage, 2 if stage > 0 and i == 0 else 1, bottleneck))
                inputs = (64 << stage) * (4 if bottleneck else 1)
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images):
        x = self.pool(F.relu(self.stem_norm(self.stem(images)), inplace=True))
        return self.head(F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


class GptBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        count, length, width = x.shape
        parts = self.mix(self.norm1(x)).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(count, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, vocabulary, context, width, heads, blocks):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(GptBlock(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, text):
        x = self.tokens(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def network(model):
    """The network that the `model` of a meta.json describes."""
    kinds = {"mlp": mlp, "one weight": OneWeight, "resnet": ResNet, "gpt": Gpt}
    sizes = dict(model)
    kind = sizes.pop("kind")
    if kind not in kinds:
        raise ValueError(f"there is no network of kind {kind!r}, there are {', '.join(kinds)}")
    return kinds[kind](**sizes)


class Task(nn.Module):
    """Network and loss as one module, so that autocast and torch.compile cover the loss, as on our side."""

    def __init__(self, model):
        super().__init__()
        self.network = network(model)

    def forward(self, inputs, targets):
        outputs = self.network(inputs)
        if targets.is_floating_point():
            return F.mse_loss(outputs, targets)
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


# ---- what the folder holds ---------------------------------------------------------------------------------------------


def read_tensor(file, shape, dtype):
    """The next numbers of an open file, in memory of torch's own (and so aligned as ours)."""
    made = torch.empty(shape, dtype=dtype)
    size = made.numel() * made.element_size()
    if size and file.readinto((ctypes.c_char * size).from_address(made.data_ptr())) != size:
        raise ValueError(f"{file.name} is shorter than meta.json says")
    return made


def read_batches(folder, meta, device):
    """K pairs of inputs and targets, on the device."""
    count = meta["batches"]

    def parts(what):
        shape, dtype = what["shape"], getattr(torch, what["dtype"])
        if shape[0] != count:
            raise ValueError(f"{what['file']} holds {shape[0]} batches, meta.json speaks of {count}")
        with open(folder / what["file"], "rb") as file:
            return [read_tensor(file, shape[1:], dtype).to(device) for _ in range(count)]

    return list(zip(parts(meta["inputs"]), parts(meta["targets"])))


@torch.no_grad()
def read_weights(path, module):
    has, needs = path.stat().st_size, 4 * sum(p.numel() for p in module.parameters())
    if has != needs:
        raise ValueError(f"{path} has {has} bytes, the parameters of this network are {needs}")
    with open(path, "rb") as file:
        for parameter in module.parameters():
            parameter.copy_(read_tensor(file, parameter.shape, torch.float32))


def write_weights(path, module):
    with open(path, "wb") as file:
        for parameter in module.parameters():
            values = parameter.detach().to("cpu", torch.float32).contiguous()
            file.write(ctypes.string_at(values.data_ptr(), 4 * values.numel()))


def resident(field):
    """VmRSS or VmHWM, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status does not state {field}")


class Subject:
    """Network, data and optimizer, in their initial state, and the measure of the memory that they take."""

    def __init__(self, folder, precision, device):
        self.precision, self.device = precision, device
        # The peak of the imports must not pass for the peak of the training. Some containers forbid the reset.
        with contextlib.suppress(OSError):
            pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        self.before = resident("VmRSS")
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.workload = meta["workload"]
        self.batches = read_batches(folder, meta, device)
        self.task = Task(meta["model"])
        read_weights(folder / meta["weights"], self.task)
        self.task.to(device)
        self.optimizer = torch.optim.AdamW(self.task.parameters(), lr=meta["learning_rate"], betas=(0.9, 0.999), eps=1e-8,
                                           weight_decay=meta["weight_decay"], fused=True)

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak(self):
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else resident("VmHWM") - self.before


# ---- the peers ---------------------------------------------------------------------------------------------------------


class Eager:
    what = "the loop of PyTorch's tutorials in Python {python}"

    def __init__(self, subject):
        self.subject, self.batches, self.optimizer = subject, subject.batches, subject.optimizer
        self.step_number = 0
        self.model = subject.task
        self.versions = {}
        half = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[subject.precision]
        self.autocast = contextlib.nullcontext if half is None else lambda: torch.autocast(subject.device, half)
        self.scaler = torch.amp.GradScaler(subject.device) if subject.precision == "fp16" else None

    def step(self, inputs, targets):
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            loss = self.model(inputs, targets)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss

    def next(self):
        """The loss of one more step, a tensor that is still on the device."""
        number = self.step_number
        self.step_number += 1
        return self.step(*self.batches[number % len(self.batches)])

    def check(self, steps):
        return [self.next().detach() for _ in range(steps)]

    def run(self, steps):
        self.subject.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            self.next()
        self.subject.synchronize()
        return time.perf_counter() - started


class Compile(Eager):
    what = "the loop of PyTorch's tutorials in Python {python}, network and loss compiled by torch.compile (inductor)"

    def __init__(self, subject):
        super().__init__(subject)
        self.model = torch.compile(subject.task)


class Accelerate(Eager):
    what = "the loop of Accelerate {accelerate} in Python {python}"

    def __init__(self, subject):
        import accelerate

        super().__init__(subject)
        self.versions = {"accelerate": accelerate.__version__}
        mixed = {"fp32": "no"}.get(subject.precision, subject.precision)
        self.accelerator = accelerate.Accelerator(mixed_precision=mixed, cpu=subject.device == "cpu")
        self.model, self.optimizer = self.accelerator.prepare(subject.task, subject.optimizer)

    def step(self, inputs, targets):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(inputs, targets)
        self.accelerator.backward(loss)
        self.optimizer.step()
        return loss


class InMemory:
    """So many batches, from the given step on; a length spares Lightning the look ahead."""

    def __init__(self, batches, first, steps):
        self.batches, self.first, self.steps = batches, first, steps

    def __len__(self):
        return self.steps

    def __iter__(self):
        return (self.batches[i % len(self.batches)] for i in range(self.first, self.first + self.steps))


def lightning_module(pl, subject):
    class Module(pl.LightningModule):
        """Optimizes automatically, and takes the time in the two hooks that Lightning calls for every batch anyway."""

        def __init__(self):
            super().__init__()
            self.task, self.losses, self.steps, self.seconds = subject.task, None, 0, math.nan

        def configure_optimizers(self):
            return subject.optimizer  # the same one in every fit: the training goes on

        def training_step(self, batch, _):
            loss = self.task(*batch)
            if self.losses is not None:
                self.losses.append(loss.detach())
            return loss

        def on_train_batch_start(self, _, index):
            if index == 0:
                subject.synchronize()
                self.started = time.perf_counter()

        def on_train_batch_end(self, _outputs, _batch, index):
            if index == self.steps - 1:
                subject.synchronize()
                self.seconds = time.perf_counter() - self.started

    return Module()


class Lightning:
    what = ("Trainer.fit of Lightning {lightning} in Python {python}, barebones, timed from its first on_train_batch_start to "
            "its last on_train_batch_end, so that neither set-up nor tear-down counts")

    def __init__(self, subject):
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        import lightning
        import lightning.pytorch as pl
        from lightning.pytorch.plugins.precision import MixedPrecision

        self.subject, self.step_number, self.trainer_class = subject, 0, pl.Trainer
        self.versions = {"lightning": lightning.__version__}
        self.module = lightning_module(pl, subject)
        if subject.precision == "fp16":  # one plugin for every fit: its scale must last
            self.precision = {"plugins": [MixedPrecision("16-mixed", subject.device)]}
        else:
            self.precision = {"precision": {"fp32": "32-true", "bf16": "bf16-mixed"}[subject.precision]}

    def fit(self, steps):
        trainer = self.trainer_class(accelerator={"cuda": "gpu"}.get(self.subject.device, "cpu"), devices=1, max_epochs=1,
                                     limit_train_batches=steps, limit_val_batches=0, use_distributed_sampler=False,
                                     barebones=True, **self.precision)
        self.module.steps = steps
        trainer.fit(self.module, InMemory(self.subject.batches, self.step_number, steps))
        self.step_number += steps

    def check(self, steps):
        self.module.losses = []
        self.fit(steps)
        losses, self.module.losses = self.module.losses, None
        return losses

    def run(self, steps):
        self.module.seconds = math.nan
        self.fit(steps)
        if math.isnan(self.module.seconds):
            raise RuntimeError("Lightning left its fit before the last batch")
        return self.module.seconds


PEERS = {"eager": Eager, "accelerate": Accelerate, "lightning": Lightning, "compile": Compile}


# ---- the protocol ------------------------------------------------------------------------------------------------------


def sentence(error):
    lines = str(error).strip().splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0]}"


def answer(loop, subject, line):
    verb, *rest = line.rstrip("\n").split(" ", 2)
    if verb == "memory" and not rest:
        return {"peak": subject.peak()}
    if (verb, len(rest)) not in (("run", 1), ("check", 2)):
        raise ValueError(f"there is no request {line.strip()!r}, there are `check N FILE`, `run N` and `memory`")
    steps = int(rest[0])
    if steps < 1:
        raise ValueError(f"cannot train {steps} steps")
    if verb == "run":
        return {"seconds": loop.run(steps)}
    losses = torch.stack(loop.check(steps)).tolist()
    write_weights(rest[1], subject.task)
    return {"losses": losses}


def make(options):
    """The loop, what it trains, and the hello."""
    torch.set_num_threads(options.threads)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("this torch sees no CUDA device")
    torch.backends.cudnn.allow_tf32 = options.precision != "fp32"   # fp32 is strict on both sides
    # Imports come first: their memory is not the training's.
    modules = {"accelerate": "accelerate", "lightning": "lightning.pytorch"}
    if options.peer in modules:
        __import__(modules[options.peer])
    subject = Subject(options.folder, options.precision, options.device)
    loop = PEERS[options.peer](subject)
    torch.set_num_threads(options.threads)
    versions = {"torch": torch.__version__, "python": platform.python_version(), **loop.versions}
    if options.device == "cuda":
        versions["cuda"] = torch.version.cuda
    what = f"{loop.what.format(**versions)}, fused AdamW, {options.precision} on {options.device}, workload {subject.workload}"
    return loop, subject, {"subject": what, "versions": versions, "threads": torch.get_num_threads()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="what `export` of a subject of ours wrote")
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    try:
        loop, subject, hello = make(options)
    except ImportError as error:
        streams.refuse(f"{options.peer} cannot be imported: {error}")
    except Exception as error:  # whatever it is, the driver gets a sentence
        streams.refuse(sentence(error))
    streams.answer(hello)
    for line in streams.requests:
        try:
            streams.answer(answer(loop, subject, line))
        except Exception as error:
            streams.answer({"error": sentence(error)})


if __name__ == "__main__":
    main()
