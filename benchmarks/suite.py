#!/usr/bin/env python3
"""Measures what frugal buys on this machine, against loops written by hand and against its peers.

    suite.py --programs BUILD/benchmarks --out result.json [--quick] [--only REGEX] [--peers PYTHON] ...

Every comparison has two subjects in two processes. They are compared first: the same weights after the same steps, or
within the tolerance that stands beside the result. Then they work in turns, ABBA, and the ratio is taken pair by pair. A pair during
which something else kept the machine busy is dropped and made up for. README.md describes rows, protocol and output.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import platform
import re
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

import rows as table

PAIRS = 20
PATIENCE = 600   # seconds for an answer
LONGEST = 4   # seconds that one step may take: 20 pairs of longer ones would take the time of all other rows
BUSY = "not decided: others kept the machine busy during the pairs; measure this row again when it is idle"
TICK = os.sysconf("SC_CLK_TCK")


class SubjectError(Exception):
    """A subject could not be made, or could not answer."""


class Subject:
    """A process that holds one thing to be measured. Whatever it does wrong is a SubjectError, never the end of the suite."""

    def __init__(self, command, environment, log, patience=None):
        self.name, self.unread = " ".join(os.path.basename(part) for part in command[:2]), b""
        self.patience = self.usual_patience = patience or PATIENCE
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment)
        except OSError as error:
            raise SubjectError(f"{self.name} cannot be started: {error.strerror}") from error
        try:
            self.hello = self._answer("its start", "subject")
        except BaseException:
            self.close()
            raise

    def _line(self, request):
        """A line of its output, or an error when there is none within the patience."""
        until = time.monotonic() + self.patience
        while b"\n" not in self.unread:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise SubjectError(f"{self.name} did not answer to {request} within {self.patience} s")
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                raise SubjectError(f"{self.name} ended at {request} with exit code {self._ended()}")
            self.unread += part
        line, self.unread = self.unread.split(b"\n", 1)
        return line

    def _ended(self):
        try:
            return self.process.wait(5)
        except subprocess.TimeoutExpired:
            return "none yet"

    def _answer(self, request, *keys):
        line = self._line(request)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise SubjectError(f"{self.name} answered no JSON object to {request}: {line[:60]!r}")
        if "error" in answer:
            raise SubjectError(str(answer["error"]))
        missing = [key for key in keys if key not in answer]
        if missing:
            raise SubjectError(f"{self.name} answered to {request} without {', '.join(missing)}")
        return answer

    def ask(self, request, *keys, patience=None):
        """Its answer, which has these keys, within `patience` seconds."""
        self.patience = patience or self.usual_patience
        try:
            self.process.stdin.write(request.encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise SubjectError(f"{self.name} ended before {request} with exit code {self._ended()}") from error
        return self._answer(request, *keys)

    def seconds(self, count):
        """Seconds that it says `count` units of work took, all together."""
        seconds = self.ask(f"run {count}", "seconds")["seconds"]
        if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise SubjectError(f"{self.name} says that its work took {seconds} seconds")
        return seconds

    def close(self):
        try:
            self.process.stdin.close()
        except OSError:
            pass   # it has ended already
        try:
            self.process.wait(5)
        except BaseException as error:   # an impatient Ctrl-C too must leave no process behind
            self.process.kill()
            self.process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        finally:
            self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# ---- foreign load ----------------------------------------------------------------------------------------------------

def busy_seconds():
    """CPU time of everything on this machine since it started, stolen time included."""
    try:
        fields = [int(x) for x in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / TICK


def seconds_of_process(pid):
    """CPU time of a process, its threads included."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICK


class Load:
    """What share of one core others took, besides this suite and its subjects."""

    def __init__(self, *pids):
        self.pids = (os.getpid(), *pids)
        self.begin()

    def begin(self):
        self.at, self.busy, self.own = time.monotonic(), busy_seconds(), self._own()

    def _own(self):
        return sum(seconds_of_process(pid) for pid in self.pids)

    def foreign(self):
        elapsed, busy = time.monotonic() - self.at, busy_seconds()
        if busy is None or elapsed <= 0:
            return 0.0
        return max(0.0, (busy - self.busy) - (self._own() - self.own) - 2 / TICK) / elapsed


# ---- statistics ------------------------------------------------------------------------------------------------------

def quantile(values, share):
    """By linear interpolation between the sorted values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(pairs):
    """The median ratio of (ours, baseline) pairs, baseline over ours, with its 10-90 % range, and the median times."""
    ratios = [baseline / ours for ours, baseline in pairs]
    return {"ours": statistics.median(ours for ours, _ in pairs),
            "baseline": statistics.median(baseline for _, baseline in pairs),
            "ratio": statistics.median(ratios), "low": quantile(ratios, 0.1), "high": quantile(ratios, 0.9)}


def is_met(ratio, high, goal):
    """A goal is met when the ratio reaches it, or when it lies inside the range."""
    if goal is None or ratio is None:
        return None
    return ratio >= goal or high >= goal


def empty_record(name, workload, precision, threads, unit, goal, note):
    """A record with every key of the schema, and no measurement yet."""
    return {"name": name, "workload": workload, "precision": precision, "threads": threads, "ours": None, "baseline": None,
            "unit": unit, "ratio": None, "low": None, "high": None, "ceiling_fraction": None, "goal": goal, "met": None,
            "ours_is": None, "baseline_is": None, "pairs": 0, "dropped": 0, "weights_difference": None, "loss": None,
            "baseline_loss": None, "tolerance": None, "note": note, "rerun": f"bash cmake/dev.sh bench --only '^{name}$'"}


# ---- a row -----------------------------------------------------------------------------------------------------------

class Suite:
    def __init__(self, options):
        self.options = options
        self.started = time.monotonic()
        self.programs = pathlib.Path(options.programs).resolve()
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="frugal-bench-", dir=options.scratch))
        self.log = open(self.scratch / "subjects.log", "w", encoding="utf-8")
        self.versions = {"python": platform.python_version()}
        self.ceilings, self.records, self.speeds, self.counts = [], [], [], []
        self.curves, self.memory, self.micro, self.left_out = [], [], [], []
        self.worst_load = 0.0
        self.interrupted = False

    @property
    def segment(self):
        """Seconds that one side of a pair works for."""
        return self.options.segment or (0.05 if self.options.quick else 0.1)

    def minutes(self):
        return (time.monotonic() - self.started) / 60

    def out_of_time(self):
        return self.options.minutes is not None and self.minutes() >= self.options.minutes

    def leave_out(self, name):
        self.left_out.append({"name": name, "reason": f"the {self.options.minutes} minutes were over"})

    def command(self, side, threads, folder, program="subject"):
        if side["program"] == "peer":
            return [self.options.peers, str(pathlib.Path(__file__).with_name("peers.py")), "--folder", str(folder),
                    "--threads", str(threads), "--device", self.options.device, *side["arguments"]]
        device = ["--device", self.options.device] if side["arguments"][0] in ("step", "ceiling") else []
        return [str(self.programs / f"frugal_bench_{program}"), *side["arguments"], "--threads", str(threads),
                "--directory", str(self.scratch), *device]

    def start(self, side, threads, folder=None, program="subject"):
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
        subject = Subject(self.command(side, threads, folder, program), environment, self.log)
        self.versions.update(subject.hello.get("versions", {}))
        return subject

    def export(self, side, folder):
        """Data and initial weights of our side, for a peer."""
        folder.mkdir()
        with self.start(side, 1) as subject:
            subject.ask(f"export {folder}")

    def measure(self, row, threads):
        """One record."""
        record = empty_record(row.full_name(threads), row.workload, row.precision, threads, row.unit, row.goal_for(threads), row.missing)
        record["rerun"] += f" --threads {threads}" + (f" --device {self.options.device}" if self.options.device != "cpu" else "")
        if row.missing:
            return record
        folder = self.scratch / f"data-{len(self.records)}-{threads}"
        try:
            if "peer" in (row.ours["program"], row.baseline["program"]):
                self.export(row.ours, folder)
            with self.start(row.ours, threads, folder) as ours, self.start(row.baseline, threads, folder) as baseline:
                record["ours_is"], record["baseline_is"] = ours.hello["subject"], baseline.hello["subject"]
                self.compare(row, record, ours, baseline)
                pairs = self.pairs(row, record, ours, baseline)
                record.update(summary(pairs))
                record["met"] = None if record["note"] == BUSY else is_met(record["ratio"], record["high"], record["goal"])
                record["ceiling_fraction"] = self.ceiling_fraction(row, threads, ours.hello.get("work", {}), record["ours"])
                self.note_speed(row, record, ours, baseline, threads)
        except SubjectError as error:
            record["note"] = str(error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return record

    def compare(self, row, record, ours, baseline):
        """Before anything is timed: both sides must have done the same work."""
        if row.steps == 0:
            return
        theirs, own = self.scratch / "theirs.bin", self.scratch / "own.bin"
        patience = max(60, row.steps * LONGEST)
        losses = ours.ask(f"check {row.steps} {own}", "losses", patience=patience)["losses"]
        compiles = row.baseline["label"] == "compile"   # which it does here
        expected = baseline.ask(f"check {row.steps} {theirs}", "losses",
                                patience=PATIENCE if compiles else patience)["losses"]
        compared = ours.ask(f"compare {theirs}", "difference")
        record["weights_difference"] = compared["difference"]
        record["tolerance"] = row.tolerance_text()
        if losses and expected:
            record["loss"], record["baseline_loss"] = losses[-1], expected[-1]
        problem = row.problem(compared["difference"], compared.get("moved", 1.0), losses, expected)
        if problem:
            raise SubjectError(f"not timed: the two sides differ after {row.steps} steps: {problem}")

    def pairs(self, row, record, ours, baseline):
        """Pairs of seconds per unit of work, in turns ABBA."""
        times = {subject: self.warm_up(subject, row) for subject in (ours, baseline)}
        if max(times.values()) > LONGEST:
            raise SubjectError(f"not timed: once takes {max(times.values()):.1f} s, and {LONGEST} s are allowed")
        wanted = row.pairs or self.options.pairs
        # Both sides do the same number of steps, as many as the faster one does in a segment, and twice that fit into the time.
        count = max(1, min(row.longest or 10**9, round(self.segment / max(min(times.values()), 1e-9))))
        slow = max(times.values()) * count
        if slow > 10 * self.segment and count > 1:
            count = max(1, round(count * 10 * self.segment / slow))
        load = Load(ours.process.pid, baseline.process.pid)
        pairs, dropped = [], 0
        while len(pairs) < wanted:
            order = (ours, baseline) if (len(pairs) + dropped) % 2 == 0 else (baseline, ours)
            load.begin()
            seconds = {subject: subject.seconds(count) / count for subject in order}
            foreign = load.foreign()
            self.worst_load = max(self.worst_load, foreign)
            if foreign > self.options.load and dropped < 2 * wanted:
                dropped += 1
                continue
            pairs.append((seconds[ours], seconds[baseline]))
        record["pairs"], record["dropped"] = len(pairs), dropped
        if dropped >= 2 * wanted:
            record["note"] = BUSY
        return pairs

    def warm_up(self, subject, row):
        """Seconds per unit of work once nothing is new."""
        spent, count, each = 0.0, 1, 0.0
        while spent < self.segment:
            seconds = subject.seconds(count)
            spent += max(seconds, 1e-6)
            each = seconds / count
            if row.longest:
                count = min(2 * count, row.longest)
            else:
                count = min(4 * count, max(1, int(self.segment / max(each, 1e-9))))
        return each

    def ceiling(self, name, threads):
        values = [c["value"] for c in self.ceilings if c["name"] == name and c["threads"] == threads]
        return values[0] if values else None

    def ceiling_fraction(self, row, threads, work, seconds):
        """The share of what the machine can do at best, by the operations or the bytes of the work."""
        amount = work.get("flops" if row.ceiling and row.ceiling.startswith("matmul") else "bytes")
        best = self.ceiling(row.ceiling, threads) if row.ceiling else None
        return amount / seconds / best if amount and best else None

    def note_speed(self, row, record, ours, baseline, threads):
        """Speed and memory of both sides, for steps of a workload."""
        for side, subject, mine, loss in ((row.ours, ours, record["ours"], record["loss"]),
                                          (row.baseline, baseline, record["baseline"], record["baseline_loss"])):
            if not side.get("plain"):
                continue
            entry = {"workload": row.workload, "loop": side["label"], "precision": side["precision"], "threads": threads}
            if any(all(speed[key] == value for key, value in entry.items()) for speed in self.speeds):
                continue
            samples = ours.hello["work"].get("samples")
            entry.update({"steps_per_second": 1 / mine, "samples_per_second": samples / mine if samples else None,
                          "peak_bytes": subject.ask("memory", "peak")["peak"], "loss": loss,
                          "fp32_loss": record["baseline_loss"] if row.baseline["precision"] == "fp32" else None})
            self.speeds.append(entry)

    # ---- everything else -------------------------------------------------------------------------------------------

    def measure_ceilings(self, threads_list):
        for name, method, unit in table.CEILINGS:
            precision = method.removeprefix("matmul/")
            if precision != method and precision not in self.native:   # emulated, it takes minutes and is no ceiling
                self.left_out.append({"name": f"ceiling {name}", "reason": f"this hardware has no {precision}"})
                continue
            for threads in threads_list:
                if not self.wants_ceiling(name, threads):
                    continue
                side = {"program": "subject", "arguments": ["ceiling", "--method", method]}
                try:
                    with self.start(side, threads) as subject:
                        amount = subject.hello["work"]["flops" if unit == "FLOP/s" else "bytes"]
                        count = max(1, round(self.segment / subject.seconds(1)))
                        best = min(subject.seconds(count) / count for _ in range(5 if self.options.quick else 12))
                        self.ceilings.append({"name": name, "threads": threads, "value": amount / best, "unit": unit})
                except SubjectError as error:
                    self.left_out.append({"name": f"ceiling {name}", "reason": str(error)})

    def measure_cuda_ceilings(self):
        """cuBLAS and cublasLt, called directly by a program of their own."""
        program = self.programs / "frugal_bench_ceiling_cuda"
        if not program.exists():
            self.left_out.append({"name": "ceiling cublas, cublaslt", "reason": "the suite was built without the CUDA toolkit"})
            return
        done = subprocess.run([program], stdout=subprocess.PIPE, stderr=self.log, check=False)
        if done.returncode == 0:
            self.ceilings += json.loads(done.stdout)
        else:
            self.left_out.append({"name": "ceiling cublas, cublaslt", "reason": "its program failed; there may be no device"})

    def wants_ceiling(self, name, threads):
        """Without --only all of them; else those that a chosen row is a fraction of."""
        if not self.options.only:
            return True
        return any(row.ceiling == name and threads in row.threads_of(self.options) for row in self.chosen)

    def instructions(self, name, side):
        """Instructions a step, by callgrind; None where there is no valgrind."""
        if not shutil.which("valgrind"):
            self.left_out.append({"name": f"instructions {name}", "reason": "valgrind is not installed"})
            return None
        out, steps = self.scratch / "callgrind.out", 1   # they are equal, but for a handful of instructions
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}",
                   *self.command(side, 1, None, "counter")]
        done = subprocess.run(command, input=f"instructions {steps}\n", stdout=subprocess.PIPE, stderr=self.log, text=True, check=False,
                              env=dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"))
        for dump in self.scratch.glob("callgrind.out.*"):
            text = dump.read_text(errors="replace")
            dump.unlink()
            total = re.search(r"^totals: (\d+)", text, re.MULTILINE)
            if "Client Request: counted" in text and total:
                return int(total.group(1)) / steps
        self.left_out.append({"name": f"instructions {name}", "reason": f"callgrind counted nothing (exit code {done.returncode})"})
        return None

    def measure_counts(self, instructions_too=False):
        for name, arguments in table.COUNTS:
            side = {"program": "subject", "arguments": arguments}
            try:
                with self.start(side, 1, program="counter") as subject:
                    counted = subject.ask("count 16")
                instructions = self.instructions(name, side) if name in table.INSTRUCTIONS and instructions_too else None
                self.counts.append({"name": name, **counted, "instructions": instructions})
            except SubjectError as error:
                self.left_out.append({"name": f"counts {name}", "reason": str(error)})

    def measure_memory(self):
        for workload, precision, batch in table.MEMORY:
            if precision != "fp32" and precision not in self.native:
                continue
            side = {"program": "subject", "arguments": ["step", "--workload", workload, "--precision", precision,
                                                        "--batch", str(batch)]}
            if self.out_of_time():
                self.leave_out(f"memory {workload} {precision} batch {batch}")
                continue
            try:
                with self.start(side, max(self.options.threads)) as subject:
                    subject.ask("run 3")
                    self.memory.append({"workload": workload, "precision": precision, "batch": batch,
                                        "peak_bytes": subject.ask("memory", "peak")["peak"]})
            except SubjectError as error:
                self.left_out.append({"name": f"memory {workload} {precision} batch {batch}", "reason": str(error)})

    def measure_targets(self):
        """Time to a target, one pair a seed."""
        for row in [*table.targets(self.options), *table.stopping(self.options)]:
            if not self.selected(row):
                continue
            threads = max(self.options.threads)
            if self.out_of_time():
                self.leave_out(row.full_name(threads))
                continue
            record = self.measure_target(row, threads)
            self.records.append(record)
            self.say(record)

    def measure_target(self, row, threads):
        record = self.measure(table.without_run(row), threads)
        pairs = []
        try:
            for seed in row.seeds:
                seconds = {}
                for key, side in (("baseline", row.baseline), ("ours", row.ours)):
                    seeded = dict(side, arguments=[*side["arguments"], "--seed", str(seed)])
                    with self.start(seeded, threads) as subject:
                        record[f"{key}_is"] = subject.hello["subject"]
                        answer = subject.ask("run 1", "seconds", "steps", "reached", "curve")
                    if not answer["reached"]:
                        raise SubjectError(f"the target was not reached with seed {seed} in {answer['steps']} steps: "
                                           f"{subject.hello['subject']}")
                    seconds[key] = answer["seconds"]
                    curve = answer["curve"]
                    if key == "ours":
                        record["loss"] = curve["loss"][-1]
                    else:
                        record["baseline_loss"] = curve["loss"][-1]
                    self.curves.append({"group": row.workload, "label": f"{side['label']} {side['precision']}, seed {seed}",
                                        "precision": side["precision"], "seconds": curve["seconds"], "loss": curve["loss"],
                                        "metric": curve["metric"], "steps": answer["steps"]})
                pairs.append((seconds["ours"], seconds["baseline"]))
            record.update(summary(pairs), pairs=len(pairs), note="one pair a seed")
        except SubjectError as error:
            record["note"] = str(error)
        return record

    def measure_probe(self):
        side = {"program": "subject", "arguments": ["probe"]}
        try:
            with self.start(side, 1) as subject:
                found, what = subject.ask("run 1", "share", "trials", "least_share"), subject.hello["subject"]
        except SubjectError as error:
            self.left_out.append({"name": "prober", "reason": str(error)})
            return
        for name, unit, ours, ratio in (("prober/share", "1/sample", 1 / found["share"], found["share"]),
                                        ("prober/trials", "trials", found["trials"], table.BISECTION_TRIALS / found["trials"])):
            baseline = 1.0 if unit == "1/sample" else table.BISECTION_TRIALS
            record = empty_record(name, "hidden limits", "none", 1, unit, None, "counted")
            record.update({"ours": ours, "baseline": baseline, "ratio": ratio, "low": found["least_share"] if unit == "1/sample" else ratio,
                           "high": ratio, "ours_is": what,
                           "baseline_is": "the true limit" if unit == "1/sample" else "bisection of 1 to 65536"})
            if re.search(self.options.only or "", name):
                self.records.append(record)
                self.say(record)

    def counted_records(self):
        """What all policies add to the loop by hand, as ratios of counts."""
        by_name = {count["name"]: count for count in self.counts}
        for name, ours, baseline, key, goal in table.COUNTED:
            if ours not in by_name or baseline not in by_name or not re.search(self.options.only or "", name):
                continue
            mine, theirs = by_name[ours][key], by_name[baseline][key]
            if mine is None or theirs is None:
                continue
            ratio = theirs / mine if mine else 1.0
            record = empty_record(name, ours.split("/")[0], ours.split("/")[-1], 1, f"{key}/step", goal, "counted")
            record.update({"ours": mine, "baseline": theirs, "ratio": ratio, "low": ratio, "high": ratio,
                           "met": is_met(ratio, ratio, goal), "ours_is": ours, "baseline_is": baseline})
            self.records.append(record)
            self.say(self.records[-1])

    def measure_micro(self):
        program = self.programs / "frugal_bench_micro"
        if not program.exists():
            self.left_out.append({"name": "micro", "reason": "Google Benchmark is not installed (libbenchmark-dev)"})
            return
        seconds = "0.05" if self.options.quick else "0.5"
        done = subprocess.run([program, "--benchmark_format=json", f"--benchmark_min_time={seconds}"], stdout=subprocess.PIPE,
                              stderr=self.log, check=False, env=dict(os.environ, OMP_NUM_THREADS="1"))
        if done.returncode != 0:
            self.left_out.append({"name": "micro", "reason": f"its program ended with exit code {done.returncode}"})
            return
        scale = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
        for each in json.loads(done.stdout)["benchmarks"]:
            self.micro.append({"name": each["name"], "ns": each["real_time"] * scale[each["time_unit"]],
                               "bytes_per_second": each.get("bytes_per_second")})

    def wants(self, *names):
        return any(re.search(self.options.only or "", name) for name in names)

    def selected(self, row):
        if self.options.quick and not row.quick and not self.options.only:
            return False
        return any(re.search(self.options.only or "", row.full_name(threads)) for threads in row.threads_of(self.options))

    def say(self, record):
        left = f"{record['name']:<42}"
        if record["ratio"] is None:
            print(f"{left} -      {record['note']}", flush=True)
            return
        verdict = {True: "met", False: "NOT MET", None: "not decided, the machine is busy"}[record["met"]]
        goal = "" if record["goal"] is None else f"  goal {record['goal']:g}: {verdict}"
        print(f"{left} {record['ratio']:6.2f}x [{record['low']:.2f}, {record['high']:.2f}]{goal}", flush=True)

    def find_hardware(self):
        """Which precisions this hardware computes itself."""
        flags = table.cpu_flags()
        self.native = {"fp32"}
        if self.options.device == "cpu":
            if flags & {"avx512_bf16", "amx_bf16", "bf16"}:
                self.native.add("bf16")
            if flags & {"avx512_fp16", "amx_fp16", "asimdhp"}:
                self.native.add("fp16")
        else:
            try:   # one sentence now, not one a row
                with self.start({"program": "subject", "arguments": ["step", "--workload", "W0"]}, 1):
                    pass
            except SubjectError as error:
                sys.exit(f"bench: --device {self.options.device}: {str(error).splitlines()[0]}")
            self.native |= table.gpu_precisions(self.versions)

    def run(self):
        self.find_hardware()
        everything = table.rows(self.options, self.native, self.left_out)
        self.chosen = [row for row in everything if self.selected(row)]
        whole = not self.options.only
        self.measure_ceilings(self.options.threads)
        if self.options.device != "cpu" and whole:
            self.measure_cuda_ceilings()
        for row in self.chosen:
            for threads in row.threads_of(self.options):
                name = row.full_name(threads)
                if not re.search(self.options.only or "", name):
                    continue
                if self.out_of_time():
                    self.leave_out(name)
                    continue
                self.records.append(self.measure(row, threads))
                self.say(self.records[-1])
        if self.out_of_time():
            self.leave_out("prober, counted, micro, memory, target")
            return self.result()
        if self.wants("prober/share", "prober/trials"):
            self.measure_probe()
        if self.wants(*(name for name, *_ in table.COUNTED)):
            self.measure_counts(instructions_too=not self.options.quick)
            self.counted_records()
        if whole:
            self.measure_micro()
        if whole and not self.options.quick and not self.out_of_time():
            self.measure_memory()
        if (not self.options.quick or self.options.only) and not self.out_of_time():
            self.measure_targets()
        if self.options.quick and whole:
            self.left_out.append({"name": "target/*", "reason": "time to target takes too long for --quick"})
        return self.result()

    def result(self):
        return {"schema": 1, "mode": "quick" if self.options.quick else "full", "interrupted": self.interrupted,
                "command": self.options.command, "started": self.options.started, "minutes": round(self.minutes(), 1), "machine": table.machine(self),
                "versions": self.versions, "ceilings": self.ceilings, "records": self.records, "speeds": self.speeds,
                "counts": self.counts, "curves": self.curves, "memory": self.memory, "micro": self.micro,
                "left_out": self.left_out}


def check_counts(suite):
    """1 when a step of ours costs more beyond the loop by hand than its limit, in things that are counted."""
    suite.measure_counts()
    by_name = {count["name"]: count for count in suite.counts}
    failed = bool(suite.left_out)
    for problem in suite.left_out:
        print(f"{problem['name']}: {problem['reason']}")
    for (ours, baseline), limits in table.COUNT_LIMITS.items():
        if ours not in by_name or baseline not in by_name:
            continue
        for key, limit in limits.items():
            more = by_name[ours][key] - by_name[baseline][key]
            holds = more <= limit
            failed |= not holds
            print(f"{ours} beyond {baseline}: {more:g} {key} a step, at most {limit}{'' if holds else '   FAIL'}")
    return 1 if failed else 0


def read_result(file):
    """The result in a file, or the end of the program with one sentence."""
    try:
        result = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
        if result["schema"] != 1:
            raise ValueError(f"schema {result['schema']}, and this suite reads 1")
        names = set()
        for record in result["records"]:
            numbers = [record[key] for key in ("ratio", "low", "high")]
            if not isinstance(record["name"], str) or record["name"] in names:
                raise ValueError("a record without a name of its own")
            if any(n is not None for n in numbers) and not all(n > 0 for n in numbers):
                raise ValueError(f"{record['name']} has a ratio that is none")
            names.add(record["name"])
            record.setdefault("met", None)
        return result
    except OSError as error:
        sys.exit(f"bench: {file} cannot be read: {error.strerror}")
    except (ValueError, KeyError, TypeError) as error:
        sys.exit(f"bench: {file} is no result of this suite ({type(error).__name__}: {error})")


def compare_results(first, second):
    """Prints how the ratios of two results differ; 1 when a goal that was met is met no more, or no longer measured."""
    one, other = read_result(first), read_result(second)
    before = {record["name"]: record for record in one["records"]}
    after = {record["name"]: record for record in other["records"]}
    partial = other.get("mode") == "quick" or "--only" in other.get("command", "")
    lost = False
    print(f"{'':<42} {first} -> {second}")
    for name in [*before, *(name for name in after if name not in before)]:
        mark, goal_lost = compared(before.get(name), after.get(name), partial)
        lost |= goal_lost
        print(f"{name:<42} {mark}{', goal LOST' if goal_lost else ''}")
    return 1 if lost else 0


def compared(old, new, partial):
    """What became of one row, in words, and whether a goal was lost by it."""
    if new is None:
        return "in the first one alone", bool(old["met"]) and not partial
    if old is None:
        return "in the second one alone", False
    if new["ratio"] is None:
        return f"no longer measured: {new.get('note')}", bool(old["met"])
    if old["ratio"] is None:
        return f"measured for the first time: {new['ratio']:.2f}x", False
    apart = new["low"] > old["high"] or new["high"] < old["low"]
    change = new["ratio"] / old["ratio"] - 1
    mark = ("better" if change > 0 else "WORSE") if apart else "the same within the ranges"
    if old["met"] and new["met"] is None:
        mark += ", goal no longer decided: the machine was busy"
    return f"{old['ratio']:6.2f}x -> {new['ratio']:6.2f}x  {change:+7.1%}  {mark}", bool(old["met"]) and new["met"] is False


def without_nan(value):
    """JSON knows neither NaN nor infinity."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Output:
    """The file for the result. Tried before the measuring; there only when it is whole."""

    def __init__(self, path):
        self.path = pathlib.Path(path).resolve()
        self.unfinished = self.path.with_name(self.path.name + ".unfinished")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.is_file():
                raise OSError(0, "it is no file")
            self.unfinished.write_text("", encoding="utf-8")
        except OSError as error:
            sys.exit(f"bench: {path} cannot be written: {error.strerror}")

    def write(self, result):
        text = json.dumps(without_nan(result), indent=1, allow_nan=False) + "\n"
        try:
            self.unfinished.write_text(text, encoding="utf-8")
            os.replace(self.unfinished, self.path)
        except OSError as error:
            print(text)
            sys.exit(f"bench: {self.path} cannot be written: {error.strerror}; the result is above")
        void = sum(record["ratio"] is None for record in result["records"])
        print(f"{len(result['records'])} records in {self.path}, {result['minutes']} minutes"
              + (f"; {void} of them could not be measured" if void else ""))


def parse(arguments):
    parser = argparse.ArgumentParser(prog="bench", description="Measures what frugal buys on this machine.")
    parser.add_argument("--quick", action="store_true", help="the most telling rows, in under 5 minutes on 2 cores")
    parser.add_argument("--only", metavar="REGEX", help="the rows whose name matches, quick or not")
    parser.add_argument("--list", action="store_true", help="the names of all rows; with --quick, of those")
    parser.add_argument("--threads", metavar="N,N", help="thread counts; default: 1 and all cores")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--minutes", type=float, help="no row begins after so many minutes")
    parser.add_argument("--compare", nargs=2, metavar="JSON", help="how two results differ; measures nothing")
    parser.add_argument("--out", help="the file for the result")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs a row, 20 at least")
    parser.add_argument("--segment", type=float, help="seconds that one side of a pair works for")
    parser.add_argument("--load", type=float, default=0.15, help="share of a core that others may take during a pair")
    parser.add_argument("--check-counts", action="store_true", help="counts alone, held against their limits")
    parser.add_argument("--programs", default="build/bench/benchmarks", help="the folder with frugal_bench_subject")
    parser.add_argument("--peers", default=None, metavar="PYTHON", help="a Python that has torch, Accelerate and Lightning")
    parser.add_argument("--scratch", default=None, help="the folder for temporary files; its disk is the one that is measured")
    parser.add_argument("--command", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.command:
        options.command = " ".join(["python3 benchmarks/suite.py", *arguments])
    if options.pairs < PAIRS:
        parser.error(f"--pairs: at least {PAIRS}, or the range means little")
    cores = len(os.sched_getaffinity(0))
    options.cores = cores
    try:
        if options.threads and not re.fullmatch(r"\d+(,\d+)*", options.threads):
            raise ValueError("--threads: numbers such as 1,2")
        options.threads = sorted({int(n) for n in options.threads.split(",")}) if options.threads else sorted({1, cores})
        if options.threads[0] < 1 or options.threads[-1] > cores:
            raise ValueError(f"--threads: 1 to {cores} on this machine")
        for name in ("minutes", "segment", "load"):
            value = getattr(options, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name}: a number above 0")
        re.compile(options.only or "")
    except (ValueError, re.error) as error:
        parser.error(str(error))
    options.started = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return options


def main():
    options = parse(sys.argv[1:])
    if options.compare:
        return compare_results(*options.compare)
    if options.list:
        print("\n".join(table.names(options)))
        return 0
    if not (pathlib.Path(options.programs) / "frugal_bench_subject").exists():
        sys.exit(f"bench: there is no frugal_bench_subject in {options.programs}. `bash cmake/dev.sh bench` builds it; --programs "
                 "names another folder.")
    if not table.names(options):
        peers = "" if options.peers else "; without the Python peers (bash cmake/dev.sh bench-peers) theirs are not there"
        sys.exit(f"bench: no row matches {options.only}; bench --list has the names{peers}")
    if options.scratch and not pathlib.Path(options.scratch).is_dir():
        sys.exit(f"bench: --scratch: there is no folder {options.scratch}")
    output = Output(options.out) if options.out else None
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    suite = Suite(options)
    try:
        return check_counts(suite) if options.check_counts else measure(suite, output)
    finally:
        suite.log.close()
        shutil.rmtree(suite.scratch, ignore_errors=True)


def measure(suite, output):
    """The exit code. Whatever ends the measuring, what was measured is written."""
    code = 0
    try:
        suite.run()
    except KeyboardInterrupt:
        code = 130
    except Exception as error:   # pylint: disable=broad-except
        traceback.print_exc()
        code = 1
        suite.left_out.append({"name": "everything after that", "reason": f"{type(error).__name__}: {error}"})
    if code == 130:
        done = {record["name"] for record in suite.records}
        rest = [name for name in table.names(suite.options) if name not in done]
        suite.left_out.append({"name": f"everything after that, {len(rest)} rows", "reason": "interrupted"})
    suite.interrupted = code != 0
    if output:
        output.write(suite.result())
    return code


if __name__ == "__main__":
    sys.exit(main())
