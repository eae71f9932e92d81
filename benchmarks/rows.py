"""What suite.py measures: one Row is one comparison, with its goal. The name's first part is its chapter."""

import dataclasses
import math
import os
import pathlib
import platform
import re
import shutil
import subprocess
import typing

TUNED = "--tuned"   # tune_allocator() before anything else
ALIKE = 1.2   # how much farther one side's weights may go than the other's: a side that makes fewer steps falls behind
BISECTION_TRIALS = 17  # halving 1 to 65536


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    workload: str
    precision: str
    ours: dict
    baseline: dict
    unit: str = "s/step"
    goal: typing.Any = None        # a ratio, or one for each thread count
    weights: float = 0.01          # how far the weights may be apart after `steps`, as a share of how far they went
    loss: float = 0.01             # how far the losses may be apart, as a share of the first one
    steps: int = 8                 # before the comparison; 0: nothing is compared
    ceiling: typing.Optional[str] = None
    quick: bool = False
    threads: typing.Any = "all"    # all cores; "each": all that were asked for; or a tuple of them
    longest: typing.Optional[int] = None   # units of work in a turn, at most
    pairs: typing.Optional[int] = None
    missing: typing.Optional[str] = None   # the feature or hardware that is not there
    seeds: tuple = ()

    def full_name(self, threads):
        return f"{self.name}/threads{threads}"

    def threads_of(self, options):
        if self.threads == "each":
            return options.threads
        if self.threads == "all":
            return [max(options.threads)]
        return [n for n in self.threads if n <= max(options.threads)] or [max(options.threads)]

    def goal_for(self, threads):
        return self.goal.get(threads) if isinstance(self.goal, dict) else self.goal

    def tolerance_text(self):
        return f"after {self.steps} steps: weights {self.weights:g} of how far they went, loss {self.loss:g} of the first one"

    def problem(self, weights, moved, losses, expected):
        """What is wrong with the comparison, or None. `moved`: how far our weights went, as a share of how far theirs did."""
        if not (_is_number(weights) and 0 <= weights <= self.weights):
            return f"the weights are {weights} of their way apart, and {self.weights:g} is allowed"
        if moved is not None and not (_is_number(moved) and 1 / ALIKE <= moved <= ALIKE):
            return f"one side's weights went {moved} times as far as the other's, and {ALIKE:g} is allowed"
        if len(losses) != len(expected) or not all(map(_is_number, [*losses, *expected])):
            return f"a loss is missing or no number: {losses[-1:]} and {expected[-1:]}"
        if losses and not abs(losses[-1] - expected[-1]) <= self.loss * abs(expected[0]):
            return f"the losses are {losses[-1]:.6g} and {expected[-1]:.6g}, and {self.loss:g} of {expected[0]:.6g} is allowed"
        return None


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def without_run(row):
    """The row's record without a measurement: the caller fills it in."""
    return dataclasses.replace(row, missing="not measured")


# ---- sides of a comparison -------------------------------------------------------------------------------------------

def step(workload, loop, precision, *more, label=None):
    arguments = ["step", "--workload", workload, "--loop", loop, "--precision", precision, *more]
    plain = not set(more) - {"--clip"}   # as it comes: its speed goes into the table of speeds
    return {"program": "subject", "arguments": arguments, "label": label or loop, "precision": precision, "plain": plain}


def part(kind, method, workload=""):
    arguments = [kind, "--method", method] + (["--workload", workload] if workload else [])
    return {"program": "subject", "arguments": arguments, "label": method, "precision": "fp32"}


def peer(name, precision):
    return {"program": "peer", "arguments": ["--peer", name, "--precision", precision], "label": name, "precision": precision,
            "plain": True}


LOW = {"weights": 0.8, "loss": 0.02}        # between precisions: AdamW makes whole steps of gradients that rounding turns around
FORWARD_BACKWARD = "--forward-backward"
STEPS = ("W1", "W2", "W3b32", "W3b256", "W4", "W5", "W6")
ON_A_GPU = ("G3", "G2", "G1", "G3b1", "W6", "W4", "W2")   # the most telling first, since time there is dear


def matmul(precision):
    return f"matmul/{precision}"


# ---- chapters --------------------------------------------------------------------------------------------------------

def precision_rows(options, native, left_out):
    """What a precision buys: the same Trainer in it and in float32."""
    workloads = STEPS if options.device == "cpu" else ON_A_GPU
    quick = {"W1"}   # W2, W4 and W5 are in the goals below
    for precision in ("tf32", "bf16", "fp16"):
        if precision not in native:
            left_out.append({"name": f"precision/{precision}/*", "reason": f"this hardware has no {precision}"})
            continue
        for workload in workloads:
            yield Row(f"precision/{precision}/{workload}", workload, precision,
                      step(workload, "frugal", precision), step(workload, "frugal", "fp32"), ceiling=matmul(precision),
                      quick=precision == "bf16" and workload in quick, threads="each" if workload == "W1" else "all", **LOW)
    for workload in workloads:
        yield Row(f"precision/auto/{workload}", workload, "auto", step(workload, "frugal", "auto"),
                  step(workload, "frugal", "fp32"), quick=workload == "W1", **LOW)


def precision_goals(_options, native, _left_out):
    """The goals that precision has."""
    bf16 = None if "bf16" in native else "this hardware has no bf16"
    half = (FORWARD_BACKWARD,)

    def goal(name, workload, goal, ours, baseline, **more):
        return Row(f"precision/goal/{name}", workload, "bf16", ours, baseline, goal=goal, missing=bf16, **{**LOW, **more})
    yield goal("bf16-W2", "W2", 2.0, step("W2", "own", "bf16", *half), step("W2", "own", "fp32", *half), quick=True,
               ceiling=matmul("bf16"))
    yield goal("bf16-W3b256-tuned", "W3b256", 2.2, step("W3b256", "own", "bf16", TUNED, *half),
               step("W3b256", "own", "fp32", TUNED, *half), ceiling=matmul("bf16"))
    yield goal("bf16-W3b256-tuned-against-plain", "W3b256", 2.4, step("W3b256", "own", "bf16", TUNED, *half),
               step("W3b256", "naive", "fp32", *half), ceiling=matmul("bf16"))
    yield goal("bf16-W4-against-plain", "W4", 1.9, step("W4", "frugal", "bf16"), step("W4", "naive", "fp32"),
               ceiling=matmul("bf16"), quick=True)
    attention = "--attention-fp32"
    for workload, over_fp32, over_stock in (("W5", 1.5, 1.35), ("W6", 1.4, 1.13)):
        yield goal(f"bf16-{workload}", workload, over_fp32, step(workload, "frugal", "bf16", attention, "--casts-per-step"),
                   step(workload, "frugal", "fp32"), ceiling=matmul("bf16"), quick=workload == "W5")
        yield goal(f"bf16-{workload}-against-stock", workload, over_stock, step(workload, "own", "bf16", attention, *half),
                   step(workload, "naive", "bf16", *half), ceiling=matmul("bf16"), quick=workload == "W5")


def calibrated_rows(_options, native, _left_out):
    """Auto after calibrate() against the same Trainer in float32, and in bfloat16 as LibTorch's autocast has it."""
    bf16 = None if "bf16" in native else "this hardware has no bf16"
    shapes = [(workload, workload, ()) for workload in STEPS]
    shapes += [(f"width{width}-batch{batch}", f"grid/{width}", ("--batch", str(batch)))
               for width in (64, 256, 1024) for batch in (32, 256)]
    for name, workload, more in shapes:
        for other, precision in (("fp32", "fp32"), ("stock", "bf16")):
            yield Row(f"precision/calibrated/{name}-against-{other}", workload, "auto",
                      step(workload, "frugal", "calibrated", *more), step(workload, "frugal", precision, *more), goal=0.98,
                      missing=bf16 if precision == "bf16" else None, quick=name == "W1", **LOW)


def update_rows(*_):
    """The optimizer's step alone."""
    triad = "memory/triad"
    for weights, goal, threads, quick in (("gpt77", 4.8, "each", True), ("resnet62", 5.6, "each", False),
                                          ("one16m", 6.5, "each", True), ("many200", {1: 30, 2: 9}, "each", True)):
        yield Row(f"update/fused/{weights}", weights, "fp32", part("update", "fused", weights), part("update", "optim", weights),
                  goal=goal, threads=threads, ceiling=triad if weights in ("gpt77", "one16m") else None, quick=quick)
    yield Row("update/whole/gpt77", "gpt77", "fp32", part("update", "whole", "gpt77"), part("update", "bare", "gpt77"),
              goal=0.87, quick=True, ceiling=triad)
    yield Row("update/fused-against-bare/many200", "many200", "fp32", part("update", "fused", "many200"),
              part("update", "bare", "many200"), threads=(1,))


def together_rows(_options, native, _left_out):
    """Everything on, where it adds up: a model of 25 million weights on micro-batches of 8, 8 of them a step."""
    bf16 = None if "bf16" in native else "this hardware has no bf16"
    split = ("--batch", "8", "--window", "8")
    ours = step("W3b32", "frugal", "bf16", *split, "--clip", "--casts-per-step", TUNED, label="frugal, all on")
    for name, precision, goal in (("fp32", "fp32", 2.8), ("autocast", "bf16", 3.1)):
        yield Row(f"together/W3-against-naive-{name}", "W3", "bf16", ours, step("W3b32", "naive", precision, *split), goal=goal,
                  steps=3, missing=bf16, quick=name == "fp32", **LOW)


def lever_rows(_options, native, _left_out):
    """Each lever alone."""
    split = ("--batch", "8", "--window", "4")
    for workload in ("W2", "W3b32"):
        yield Row(f"lever/accumulation/{workload}", workload, "fp32", step(workload, "frugal", "fp32", "--unfused", *split),
                  step(workload, "naive", "fp32", *split))
    for workload in ("W1", "W2", "W3b32", "W5"):
        yield Row(f"lever/fused/{workload}", workload, "fp32", step(workload, "frugal", "fp32"),
                  step(workload, "frugal", "fp32", "--unfused"), quick=workload == "W5")
    for precision in ("fp32", "bf16"):
        if precision in native:
            yield Row(f"lever/allocator/W3-{precision}", "W3b32", precision,
                      step("W3b32", "frugal", precision, *split, TUNED, label="frugal, allocator tuned"),
                      step("W3b32", "frugal", precision, *split), quick=precision == "fp32")
    for precision in ("fp32", "bf16"):
        if precision in native:
            yield Row(f"lever/channels_last/W4-{precision}", "W4", precision, step("W4", "frugal", precision, "--channels-last"),
                      step("W4", "frugal", precision), **LOW)
    if "bf16" in native:
        for workload in ("W2", "W3b32"):
            yield Row(f"lever/weight-casts/{workload}", workload, "bf16", step(workload, "frugal", "bf16", *split, "--casts-per-step"),
                      step(workload, "frugal", "bf16", *split), **LOW)
    # What the prober is for: the largest micro-batch that fits, against one that was guessed. (Not with BatchNorm, which would see other
    # batches.)
    yield Row("lever/probing/W2", "W2", "fp32", step("W2", "frugal", "fp32", label="frugal, whole batch"),
              step("W2", "frugal", "fp32", "--split", "8", label="frugal, 8 micro-batches"))
    yield Row("lever/clip/W2", "W2", "fp32", step("W2", "frugal", "fp32"), step("W2", "frugal", "fp32", "--clip"))
    yield Row("lever/background-save/gpt77", "W6", "fp32", part("save", "stall"), part("save", "blocking"), steps=1, longest=1,
              unit="s/save", threads=(1,))


def gpu_lever_rows(*_):
    """Levers that only a GPU has."""
    for workload in ("G1", "G3b1"):
        yield Row(f"lever/lagged-skips/{workload}", workload, "fp16", step(workload, "frugal", "fp16", "--lagged-skips"),
                  step(workload, "frugal", "fp16"))


def overhead_rows(*_):
    """What the Trainer costs where there is nothing to compute."""
    yield Row("overhead/no-policies/W0", "W0", "fp32", step("W0", "bare", "fp32"), step("W0", "naive", "fp32"), threads=(1,), quick=True)
    yield Row("overhead/all-policies/W1", "W1", "fp32", step("W1", "frugal", "fp32", "--clip"), step("W1", "best", "fp32"),
              threads=(1,), quick=True)


def peer_rows(options, native, left_out):
    """The same step elsewhere. Every policy of ours is on; the peers' extras are off."""
    for workload in ("W1", "W2", "W5"):
        for precision in ("fp32", "bf16"):
            if precision not in native:
                continue
            for loop, label in (("naive", "naive-cpp"), ("best", "best-cpp")):
                yield Row(f"peer/{label}/{workload}-{precision}", workload, precision, step(workload, "frugal", precision, "--clip"),
                          step(workload, loop, precision), threads=(1,) if workload == "W1" else "all",
                          quick=workload == "W1" and precision == "fp32", **(LOW if precision == "bf16" else {}))
    if not options.peers:
        left_out.append({"name": "peer/{eager,accelerate,lightning,compile}/*",
                         "reason": "the Python peers are not set up (bash cmake/dev.sh bench-peers)"})
        return
    goals = {"eager": 2.8, "accelerate": 4.4, "lightning": 6.0}
    for workload in ("W1", "W2", "W4", "W5"):
        for precision in ("fp32", "bf16"):
            if precision not in native:
                continue
            peers = ("eager",) if workload == "W4" else ("eager", "accelerate", "lightning")
            compiles = precision == "fp32" or workload == "W5"   # it takes a minute each
            for name in (*peers, "compile") if compiles and workload != "W4" else peers:
                goal = goals.get(name) if workload == "W1" and precision == "fp32" else None
                yield Row(f"peer/{name}/{workload}-{precision}", workload, precision, step(workload, "frugal", precision, "--clip"),
                          peer(name, precision), goal=goal, threads=(1,) if workload == "W1" else "all",
                          quick=goal is not None, **(LOW if precision == "bf16" or name == "compile" or workload == "W4" else {}))


def storage_rows(*_):
    """Checkpoints and batches."""
    save = {"unit": "s/save", "steps": 1, "longest": 1, "threads": (1,)}
    yield Row("checkpoint/stall-against-torch-save/gpt77", "W6", "fp32", part("save", "stall"), part("save", "torch"), quick=True, **save)
    yield Row("checkpoint/stall-against-memcpy/gpt77", "W6", "fp32", part("save", "stall"), part("save", "memcpy"), quick=True, **save)
    yield Row("checkpoint/durable-against-raw-write/gpt77", "W6", "fp32", part("save", "durable"), part("save", "raw"),
              ceiling="disk/write", quick=True, **save)
    yield Row("batches/epoch-against-dataloader", "20000 x 784", "fp32", part("epoch", "frugal"), part("epoch", "dataloader"),
              unit="s/epoch", weights=1e-3, steps=1, quick=True, threads=(1,))


def rows(options, native, left_out):
    chapters = (precision_goals, calibrated_rows, update_rows, together_rows, overhead_rows, storage_rows, peer_rows, precision_rows, lever_rows)
    if options.device != "cpu":
        chapters = (precision_rows, together_rows, gpu_lever_rows, peer_rows)
        left_out.append({"name": "update, checkpoint, batches, overhead, the other levers", "reason": "measured on the CPU: --device cpu"})
    else:
        left_out.append({"name": "on a GPU: G1 (MLP 3 x 4096), G2 (ResNet-50), G3 (GPT-2 small), cuBLAS and cublasLt ceilings",
                         "reason": "no CUDA device was asked for (--device cuda)"})
    return [row for chapter in chapters for row in chapter(options, native, left_out)]


def targets(_options):
    """Time to a target on real data, three seeds each."""
    seeds = (1, 2, 3)
    for workload, target in (("fashion-mnist", "90"), ("text", "2.3")):
        def side(loop, precision, target=target, workload=workload):
            return {"program": "subject", "label": loop, "precision": precision,
                    "arguments": ["target", "--workload", workload, "--loop", loop, "--precision", precision, "--target", target]}
        yield Row(f"target/{workload}", workload, "auto", side("frugal", "auto"), side("naive", "fp32"), unit="s/training",
                  seeds=seeds, steps=0)


def stopping(_options):
    """A training that ends when it stopped learning, against one that goes on to its last step."""
    def side(method):
        return {"program": "subject", "label": method, "precision": "fp32",
                "arguments": ["target", "--workload", "fashion-mnist", "--loop", "frugal", "--precision", "fp32", "--method", method]}
    yield Row("lever/early-stopping/fashion-mnist", "fashion-mnist", "fp32", side("patience"), side("whole"),
              unit="s/training", seeds=(1,), steps=0)


def names(options):
    left_out = []
    everything = rows(options, {"fp32", "tf32", "bf16", "fp16"}, left_out) + list(targets(options)) + list(stopping(options))
    fixed = ["prober/share", "prober/trials"] + [name for name, *_ in COUNTED]
    chosen = [row for row in everything if row.quick or not options.quick or options.only]
    all_names = [row.full_name(threads) for row in chosen for threads in row.threads_of(options)] + fixed
    return [name for name in all_names if re.search(options.only or "", name)]


CEILINGS = [("matmul/fp32", "matmul/fp32", "FLOP/s"), ("matmul/tf32", "matmul/tf32", "FLOP/s"),
            ("matmul/bf16", "matmul/bf16", "FLOP/s"), ("matmul/fp16", "matmul/fp16", "FLOP/s"),
            ("memory/read", "memory/read", "byte/s"), ("memory/copy", "memory/copy", "byte/s"),
            ("memory/triad", "memory/triad", "byte/s"), ("disk/write", "disk/write", "byte/s")]

_ALL = ["--clip"]
COUNTS = [(f"{workload}/{loop}/{precision}", ["step", "--workload", workload, "--loop", loop, "--precision", precision, *more])
          for workload in ("W1", "W2") for precision in ("fp32", "bf16")
          for loop, more in (("naive", []), ("best", []), ("bare", []), ("frugal", _ALL)) if (loop, precision) != ("bare", "bf16")]

# What all policies add to the best loop by hand, which does the same work but for the norm.
COUNTED = [(f"counted/{key}/W2-{precision}", f"W2/frugal/{precision}", f"W2/best/{precision}", key, goal)
           for precision in ("fp32", "bf16") for key, goal in (("allocations", 1.0), ("reads", 1.0), ("casts", None), ("instructions", 0.99))]

# Where instructions are counted as well: valgrind knows neither AVX-512 nor AMX, so in float32.
INSTRUCTIONS = {f"{workload}/{loop}/fp32" for workload in ("W1", "W2") for loop in ("best", "frugal")}

# More of each a step than the loop by hand may cost; a check fails above it.
COUNT_LIMITS = {(f"{workload}/frugal/{precision}", f"{workload}/best/{precision}"):
                {"allocations": 0, "operators": 0, "casts": 0, "reads": 0}
                for workload in ("W1", "W2") for precision in ("fp32", "bf16")}

MEMORY = [(workload, precision, batch) for workload, batches in (("W2", (64, 256, 1024, 4096)), ("W5", (4, 12, 48)))
          for precision in ("fp32", "bf16") for batch in batches]


# ---- the machine -----------------------------------------------------------------------------------------------------

def cpu_flags():
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return set(found.group(1).split()) if found else set()


def gpu():
    """Name, driver and clocks of the first GPU, as the driver says them."""
    if not shutil.which("nvidia-smi"):
        return None
    query = "name,driver_version,clocks.sm,clocks.max.sm,compute_cap"
    done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True, check=False)
    if done.returncode != 0 or not done.stdout.strip():
        return None
    name, driver, clock, most, capability = (field.strip() for field in done.stdout.splitlines()[0].split(","))
    return {"name": name, "driver": driver, "clock_mhz": _number(clock), "max_clock_mhz": _number(most),
            "compute_capability": capability}


def _number(text):
    try:
        return float(text)
    except ValueError:
        return None


def gpu_precisions(_versions):
    found = gpu()
    capability = float(found["compute_capability"]) if found else 0.0
    return ({"fp16"} if capability >= 7 else set()) | ({"bf16", "tf32"} if capability >= 8 else set())


def machine(suite):
    def read(path):
        try:
            return pathlib.Path(path).read_text().strip()
        except OSError:
            return None
    name = re.search(r"^model name\s*:\s*(.*)$", read("/proc/cpuinfo") or "", re.MULTILINE)
    interesting = {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_fp16", "bf16",
                   "asimdhp"}
    return {"processor": name.group(1) if name else platform.machine(), "cores": suite.options.cores,
            "flags": sorted(cpu_flags() & interesting), "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "gpu": gpu() if suite.options.device != "cpu" else None, "kernel": platform.release(), "libc": " ".join(platform.libc_ver()),
            "governor": read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            "allocator": {key: value for key, value in os.environ.items() if key.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))}
                         or "the C library's, as it comes",
            "load": f"others took at most {math.ceil(100 * suite.worst_load)} % of a core during any pair; pairs above "
                    f"{round(100 * suite.options.load)} % were dropped, but in rows that say that the machine is busy"}
