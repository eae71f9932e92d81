#!/usr/bin/env python3
"""Tests of peers.py, on the CPU: `PYTHON benchmarks/test_peers.py`, with a Python that has the peers. What it lacks is skipped."""

import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
HAS = {name: importlib.util.find_spec(name) is not None for name in ("torch", "accelerate", "lightning")}
STEPS = 5
MODELS = {
    "mlp": {"kind": "mlp", "sizes": [12, 16, 16, 4]},
    "resnet": {"kind": "resnet", "blocks": [1, 1], "bottleneck": False, "classes": 4, "stem": 3},
    "bottleneck": {"kind": "resnet", "blocks": [1, 2], "bottleneck": True, "classes": 4, "stem": 7},
    "gpt": {"kind": "gpt", "vocabulary": 17, "context": 8, "width": 16, "heads": 2, "blocks": 2},
    "one weight": {"kind": "one weight"},
}


def need(*packages):
    missing = [name for name in packages if not HAS[name]]
    return unittest.skipIf(missing, f"not installed: {', '.join(missing)}")


def export(folder, name, batches=3, batch=4):
    """What our side exports: three files of numbers and a meta.json."""
    import torch

    import peers

    torch.manual_seed(1)
    model = MODELS[name]
    task = peers.Task(model)
    if model["kind"] == "gpt":
        inputs = torch.randint(model["vocabulary"], (batches, batch, model["context"]))
        targets = torch.randint(model["vocabulary"], inputs.shape)
    elif model["kind"] == "one weight":
        inputs, targets = torch.ones(batches, 1), torch.zeros(batches, 1)
    else:
        shape = (model["sizes"][0],) if model["kind"] == "mlp" else (3, 16, 16)
        inputs, targets = torch.randn(batches, batch, *shape), torch.randint(4, (batches, batch))
    with open(folder / "weights.bin", "wb") as file:
        for parameter in task.parameters():
            file.write(parameter.detach().numpy().tobytes())
    described = {}
    for what, tensor in (("inputs", inputs), ("targets", targets)):
        (folder / f"{what}.bin").write_bytes(tensor.numpy().tobytes())
        described[what] = {"file": f"{what}.bin", "shape": list(tensor.shape), "dtype": str(tensor.dtype).split(".")[1]}
    meta = {"workload": name, "model": model, "batches": batches, "batch": batch, **described,
            "weights": "weights.bin", "learning_rate": 1e-3, "weight_decay": 0.01}
    (folder / "meta.json").write_text(json.dumps(meta))
    return task, inputs, targets


class Peer:
    """A running peers.py. Leaving it ends its stdin, and what it did then is in `code` and `rest`."""

    def __init__(self, folder, peer, *options, environment=None):
        command = [sys.executable, HERE / "peers.py", "--folder", folder, "--peer", peer, *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        text=True, env={**os.environ, **(environment or {})})
        self.hello = json.loads(self.process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.rest, _ = self.process.communicate(timeout=120)
        self.code = self.process.returncode

    def ask(self, request):
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


class WithFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def trained(self, peer, precision):
        """Losses and weights after `check`."""
        import torch

        path = self.folder / f"{peer} weights"
        with Peer(self.folder, peer, "--precision", precision, "--threads", "1") as running:
            self.assertNotIn("error", running.hello)
            losses = running.ask(f"check {STEPS} {path}")["losses"]
        return losses, torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)


def by_hand(task, inputs, targets):
    """Losses and weights after STEPS of AdamW, written as its paper states it."""
    import torch

    parameters = list(task.parameters())
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    losses = []
    for step in range(STEPS):
        loss = task(inputs[step % len(inputs)], targets[step % len(inputs)])
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for p, g, m, v in zip(parameters, gradients, first, second):
                p.mul_(1 - 1e-3 * 0.01)
                m.mul_(0.9).add_(g, alpha=0.1)
                v.mul_(0.999).add_(g * g, alpha=0.001)
                p.sub_(1e-3 * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8))
    return losses, torch.cat([p.detach().flatten() for p in parameters])


@need("torch")
class Networks(unittest.TestCase):
    def shapes(self, name):
        import peers

        return [tuple(p.shape) for p in peers.network(MODELS[name]).parameters()]

    def test_parameters_come_in_the_order_of_ours(self):
        self.assertEqual(self.shapes("mlp"), [(16, 12), (16,), (16, 16), (16,), (4, 16), (4,)])
        block = [(32,), (32,), (96, 32), (96,), (32, 32), (32,), (32,), (32,), (128, 32), (128,), (32, 128), (32,)]
        halved = [tuple(n // 2 for n in shape) for shape in block]
        self.assertEqual(self.shapes("gpt"), [(17, 16), (8, 16), *halved, *halved, (16,), (16,), (17, 16)])
        norm = lambda width: [(width,), (width,)]
        self.assertEqual(self.shapes("resnet")[:15], [
            (64, 3, 3, 3), *norm(64),
            (64, 64, 3, 3), *norm(64), (64, 64, 3, 3), *norm(64),
            (128, 64, 3, 3), *norm(128), (128, 128, 3, 3), *norm(128)])
        self.assertEqual(self.shapes("resnet")[15:18], [(128, 64, 1, 1), *norm(128)])
        self.assertEqual(self.shapes("resnet")[18:], [(4, 128), (4,)])
        self.assertEqual(self.shapes("bottleneck")[:15], [
            (64, 3, 7, 7), *norm(64),
            (64, 64, 1, 1), *norm(64), (64, 64, 3, 3), *norm(64), (256, 64, 1, 1), *norm(256), (256, 64, 1, 1), *norm(256)])
        self.assertEqual(self.shapes("bottleneck")[15:24], [
            (128, 256, 1, 1), *norm(128), (128, 128, 3, 3), *norm(128), (512, 128, 1, 1), *norm(512)])

    def test_strides_halve_the_picture_where_they_should(self):
        import torch

        import peers

        sides = []
        network = peers.network(MODELS["bottleneck"])
        for module in network.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.register_forward_hook(lambda *what: sides.append(what[2].shape[-1]))
        self.assertEqual(network(torch.randn(2, 3, 32, 32)).shape, (2, 4))
        self.assertEqual(sides, [16, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4])  # convolutions as they run; a shortcut runs last

    def test_the_gpt_sees_nothing_of_the_future(self):
        import torch

        import peers

        network = peers.network(MODELS["gpt"])
        text = torch.randint(17, (1, 8))
        other = text.clone()
        other[0, 5] = (other[0, 5] + 1) % 17
        same = torch.isclose(network(text), network(other)).all(-1)[0]
        self.assertEqual(same.tolist(), [True] * 5 + [False] * 3)

    def test_an_unknown_network_is_named(self):
        import peers

        with self.assertRaisesRegex(ValueError, "no network of kind 'lstm'"):
            peers.network({"kind": "lstm"})


@need("torch")
class Protocol(WithFolder):
    def test_requests_are_served_until_stdin_ends(self):
        export(self.folder, "mlp")
        file = self.folder / "two words"
        with Peer(self.folder, "eager", "--threads", "1") as peer:
            self.assertEqual((peer.hello["threads"], set(peer.hello["versions"])), (1, {"torch", "python"}))
            self.assertIn("workload mlp", peer.hello["subject"])
            self.assertEqual(len(peer.ask(f"check 3 {file}")["losses"]), 3)
            self.assertGreater(peer.ask("run 2")["seconds"], 0)
            self.assertGreater(peer.ask("memory")["peak"], 0)
            for wrong in ("run", "run 0", "run many", "check 3", "stop", "", "check 1 /nowhere/at/all"):
                self.assertEqual(list(peer.ask(wrong)), ["error"], wrong)
            self.assertGreater(peer.ask("run 1")["seconds"], 0)
        self.assertEqual((peer.code, peer.rest), (0, ""))
        self.assertEqual(file.stat().st_size, 4 * (12 * 16 + 16 + 16 * 16 + 16 + 16 * 4 + 4))

    def test_training_goes_on_from_request_to_request(self):
        export(self.folder, "mlp")
        for peer, packages in (("eager", ()), ("accelerate", ("accelerate",)), ("lightning", ("lightning",))):
            if not all(HAS[package] for package in packages):
                continue  # skipped, visibly, in Peers
            with self.subTest(peer), Peer(self.folder, peer) as once, Peer(self.folder, peer) as parts:
                expected = once.ask(f"check 7 {self.folder / 'once'}")["losses"]
                first = parts.ask(f"check 2 {self.folder / 'parts'}")["losses"]
                parts.ask("run 3")
                self.assertEqual(first + parts.ask(f"check 2 {self.folder / 'parts'}")["losses"],
                                 expected[:2] + expected[5:])
                self.assertEqual((self.folder / "once").read_bytes(), (self.folder / "parts").read_bytes())

    def test_a_subject_that_cannot_be_made_says_why(self):
        with Peer(self.folder, "eager") as peer:
            self.assertIn("meta.json", peer.hello["error"])
        self.assertEqual((peer.code, peer.rest), (1, ""))

    def test_files_of_the_wrong_size_are_refused(self):
        export(self.folder, "mlp")
        for name, change in (("weights.bin", b"1234"), ("inputs.bin", b"")):
            path = self.folder / name
            whole = path.read_bytes()
            path.write_bytes(whole + change if change else whole[:-4])
            with self.subTest(name), Peer(self.folder, "eager") as peer:
                self.assertIn(name, peer.hello["error"])
            self.assertEqual(peer.code, 1)
            path.write_bytes(whole)

    def test_a_package_that_is_missing_and_noisy_is_one_sentence(self):
        export(self.folder, "mlp")
        noise = "import os\nprint('noise')\nos.write(1, b'noise')\nos.system('echo noise')\nraise ImportError('not here')\n"
        (self.folder / "accelerate.py").write_text(noise)
        with Peer(self.folder, "accelerate", environment={"PYTHONPATH": str(self.folder)}) as peer:
            self.assertEqual(peer.hello, {"error": "accelerate cannot be imported: not here"})
        self.assertEqual((peer.code, peer.rest), (1, ""))


class NoTorch(WithFolder):
    def test_a_missing_torch_is_one_sentence(self):
        (self.folder / "torch.py").write_text("print('noise')\nraise ImportError('not here')\n")
        with Peer(self.folder, "eager", environment={"PYTHONPATH": str(self.folder)}) as peer:
            self.assertEqual(peer.hello, {"error": "torch cannot be imported: not here"})
        self.assertEqual((peer.code, peer.rest), (1, ""))


@need("torch")
class Peers(WithFolder):
    eager = {}  # what it trained to: the export is the same each time

    def trained_by_eager(self, name, precision):
        if (name, precision) not in self.eager:
            self.eager[name, precision] = self.trained("eager", precision)
        return self.eager[name, precision]

    def test_eager_is_adamw_on_the_batches_in_turn(self):
        import torch

        for name in MODELS:
            with self.subTest(name):
                expected, weights = by_hand(*export(self.folder, name))
                losses, got = self.trained_by_eager(name, "fp32")
                torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-6)
                # A gradient that is nearly 0 makes AdamW's direction a matter of rounding: of few weights, by a step or two.
                self.assertLess((got - weights).abs().mean(), 1e-6)

    def test_bf16_is_not_fp32(self):
        export(self.folder, "mlp")
        full, half = self.trained_by_eager("mlp", "fp32"), self.trained_by_eager("mlp", "bf16")
        self.assertFalse(full[1].equal(half[1]))
        self.assertTrue(all(math.isclose(a, b, rel_tol=0.02) for a, b in zip(full[0], half[0])))

    def same_as_eager(self, peer, precisions=("fp32", "bf16")):
        for name in MODELS:
            export(self.folder, name)
            for precision in precisions:
                with self.subTest(name, precision=precision):
                    expected, weights = self.trained_by_eager(name, precision)
                    losses, got = self.trained(peer, precision)
                    self.assertEqual(losses, expected)
                    self.assertTrue(got.equal(weights), f"differ by {(got - weights).abs().max()}")

    @need("accelerate")
    def test_accelerate_trains_to_the_same_bits(self):
        self.same_as_eager("accelerate")

    @need("lightning")
    def test_lightning_trains_to_the_same_bits(self):
        self.same_as_eager("lightning")

    @need("lightning")
    def test_lightning_leaves_no_files(self):
        export(self.folder, "mlp")
        there = set(self.folder.iterdir())
        here = pathlib.Path.cwd()
        os.chdir(self.folder)
        try:
            with Peer(self.folder, "lightning") as peer:
                peer.ask("run 3")
        finally:
            os.chdir(here)
        self.assertEqual(set(self.folder.iterdir()), there)

    def test_compile_trains_to_nearly_the_same(self):
        for name, precision in (("mlp", "fp32"), ("mlp", "bf16"), ("gpt", "bf16"), ("resnet", "fp32")):
            export(self.folder, name)
            with self.subTest(name, precision=precision):
                expected, weights = self.trained_by_eager(name, precision)
                losses, got = self.trained("compile", precision)
                near = 1e-5 if precision == "fp32" else 3e-3
                self.assertTrue(math.isclose(losses[0], expected[0], rel_tol=near), (losses[0], expected[0]))
                # Rounding grows from step to step, most of all through batch normalisation over 4 samples.
                self.assertTrue(all(math.isclose(a, b, rel_tol=near, abs_tol=1e-3) for a, b in zip(losses, expected)),
                                (losses, expected))
                self.assertLess((got - weights).abs().mean(), 1e-4)  # of steps that are 1e-3 each


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    unittest.main(verbosity=2)
