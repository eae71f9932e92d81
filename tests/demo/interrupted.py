"""Interrupts the demo again and again and holds what remains against a run that nobody disturbed: bit for bit.

    interrupted.py PROGRAM [OPTION...]

Options replace those of the small run on synthetic images.
"""

import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

SMALL_RUN = ["--synthetic", "--epochs", "10", "--patience", "100", "--micro-batch", "48"]
PREEMPTED = 75
SIGNALS = [signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGTERM]


def tensors_of(path):
    """Names, types, shapes and bytes of a safetensors file, and its metadata."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return tensors, metadata


def newest_checkpoint(directory):
    folder = os.path.join(directory, "checkpoints")
    return os.path.join(folder, max(name for name in os.listdir(folder) if name.endswith(".safetensors")))


class Job:
    """The program at work in a directory. Its output goes to files: a pipe that nobody empties would stop it."""

    def __init__(self, program, options, directory, log):
        self.command = [program, *options, "--directory", directory]
        self.epochs = os.path.join(directory, "epochs.csv")
        self.output = log + ".out"
        self.errors = log + ".err"
        with open(self.output, "wb") as output, open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)

    def text(self):
        with open(self.output, encoding="utf-8") as output:
            return output.read()

    def lines(self):
        """Epochs in the log."""
        if not os.path.exists(self.epochs):
            return 0
        with open(self.epochs, encoding="utf-8") as file:
            return max(file.read().count("\n") - 1, 0)

    def wait_until(self, happened):
        while not happened():
            assert self.process.poll() is None, self.failed("ended too early")
            time.sleep(0.005)

    def end(self, code):
        try:
            found = self.process.wait(timeout=400)
        finally:
            self.process.kill()
        assert found == code, self.failed(f"exit code {found} instead of {code}")
        return self.text()

    def failed(self, what):
        with open(self.errors, encoding="utf-8") as errors:
            return f"{' '.join(self.command)}: {what}\n{self.text()}\n{errors.read()}"


def main(program, options, folder):
    count = iter(range(1000))

    def start(name):
        return Job(program, options, os.path.join(folder, name), os.path.join(folder, f"log{next(count)}"))

    job = start("undisturbed")
    job.wait_until(lambda: job.lines() > 0)
    began, before = time.monotonic(), job.lines()
    expected = job.end(0)
    epoch = (time.monotonic() - began) / (job.lines() - before)  # seconds
    total = job.lines()
    print(f"undisturbed: {total} epochs, one in {epoch:.2f} s")
    assert total > 2 * len(SIGNALS) - 1, "too few epochs to be interrupted so often"

    places = []
    for number, kind in enumerate(SIGNALS):
        job = start("disturbed")
        job.wait_until(lambda: "batch:" in job.text())
        known = job.lines()
        if number % 2 == 0:  # an epoch or so later; else at once, wherever that is
            job.wait_until(lambda: job.lines() > known)
        time.sleep(random.uniform(0, 0.7 * epoch))
        job.process.send_signal(kind)
        said = re.search(r"interrupted after epoch (\d+), step (\d+); the same command continues", job.end(PREEMPTED))
        assert said, job.failed("does not say where it was interrupted")
        places.append((int(said[1]), int(said[2])))
        print(f"{kind.name} after epoch {said[1]}, step {said[2]}")
    assert places == sorted(places) and places[-1][1] > places[0][1], "no progress between interruptions"

    job = start("disturbed")
    found = job.end(0)
    said = f"resumed at epoch {places[-1][0]}, step {places[-1][1]}"
    assert said in found, job.failed("does not say where it resumed")

    def accuracy(text):
        return re.search(r"test accuracy: .*", text)[0]

    one, other = (os.path.join(folder, name) for name in ("undisturbed", "disturbed"))
    tensors, metadata = tensors_of(newest_checkpoint(one))
    again, metadata_again = tensors_of(newest_checkpoint(other))
    assert sum(name.startswith("model/") for name in tensors) > 0, "a checkpoint without a model"
    assert tensors.keys() == again.keys(), tensors.keys() ^ again.keys()
    differ = [name for name in tensors if tensors[name] != again[name]]
    assert not differ, f"these tensors differ: {differ}"
    differ = [key for key in metadata.keys() | metadata_again.keys() if metadata.get(key) != metadata_again.get(key)]
    assert not differ, f"these values differ: {differ}"
    assert accuracy(found) == accuracy(expected), (found, expected)
    with open(os.path.join(one, "epochs.csv")) as log, open(os.path.join(other, "epochs.csv")) as log_again:
        assert log.read() == log_again.read(), "the logs of the epochs differ"

    said = start("disturbed").end(0)
    assert "over already" in said and accuracy(said) == accuracy(expected), said
    print(f"{len(SIGNALS)} times interrupted: {len(tensors)} tensors, {len(metadata)} values and the log are the same; "
          + accuracy(expected))


if __name__ == "__main__":
    place = tempfile.mkdtemp(prefix="frugal-demo-")
    try:
        main(sys.argv[1], sys.argv[2:] or SMALL_RUN, place)
    finally:
        shutil.rmtree(place)
