#!/usr/bin/env python3
"""Measures what README.md states, and writes it there between its two `figures` marks.

    figures.py OVERHEAD_FAKE OVERHEAD_TORCH DEMO

The programs are tests/overhead's, and the demo. Instructions are counted, so they come out the same on every run of one
build; the seconds of the demo depend on the machine, which is named beside them.
"""

import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = {
    "plain": "no policies, one weight and no tensors",
    "observed": "the same with an observer",
    "accumulating": "GradAccumulator",
    "sgd": "no policies, MLP with SGD",
    "adamw": "no policies, MLP with AdamW",
}


def run(*command):
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if finished.returncode != 0:
        sys.exit(f"{finished.stdout}\n{' '.join(map(str, command))} failed with {finished.returncode}")
    return finished.stdout


def overhead(program, what):
    """Rows of the instruction table, as tests/overhead/compare.py prints them."""
    limits = {"fake": {"plain": 16, "accumulating": 40}, "torch": {"sgd": 100, "adamw": 100, "accumulating": 120}}[what]
    with tempfile.TemporaryDirectory() as folder:
        text = run(sys.executable, ROOT / "tests/overhead/compare.py", program, pathlib.Path(folder) / "out",
                   *(f"{case}={limit}" for case, limit in limits.items()))
    rows = []
    for case in limits:
        _, hand, trainer = re.search(rf"^{case}\s+(\S+)\s+(\d+)\s+(\d+)", text, re.MULTILINE).groups()
        more = (int(trainer) - int(hand)) / int(hand) * 100
        name = NAMES[case] + (", 4 micro-batches, MLP" if case == "accumulating" and what == "torch" else "")
        rows.append(f"| {name} | {int(hand):,} | {int(trainer):,} | {more:+.2f} % |")
    return rows


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def demo(program):
    started = time.monotonic()
    text = run(program)
    seconds = time.monotonic() - started
    accuracy = re.search(r"^test accuracy: (.*)$", text, re.MULTILINE).group(1)
    report = [line for line in text.splitlines() if re.match(r"^[a-z]+:\s", line)]
    return accuracy, seconds, report


def main():
    fake, torch, demo_program = sys.argv[1:]
    cores = len(__import__("os").sched_getaffinity(0))
    accuracy, seconds, report = demo(demo_program)
    block = [
        "`bash cmake/dev.sh figures` measures this again and writes it here.",
        "",
        "Instructions per optimizer step, counted by callgrind, g++ -O2: the Trainer against the same loop written by hand (which",
        "keeps the same books: steps, samples, the last loss, and drops gradients without zero_grad()'s operators). Allocations,",
        "operators and values read back are equal; `ctest -L overhead` fails when that changes. The first two rows are loops with",
        "nothing to compute: a dozen instructions are a few nanoseconds, once a step.",
        "",
        "| loop | by hand | Trainer | more |",
        "|---|---:|---:|---:|",
        *overhead(fake, "fake"),
        *overhead(torch, "torch"),
        "",
        f"The demo on {cores} cores ({processor()}), no GPU: **{accuracy} in {seconds:.0f} s**. What it says of itself:",
        "",
        "```",
        *report,
        "```",
    ]
    readme = ROOT / "README.md"
    text = readme.read_text()
    begin, end = (re.search(rf"<!-- figures: {mark}.*?-->", text) for mark in ("begin", "end"))
    readme.write_text(text[: begin.end()] + "\n" + "\n".join(block) + "\n" + text[end.start():])
    print("\n".join(block))


if __name__ == "__main__":
    main()
