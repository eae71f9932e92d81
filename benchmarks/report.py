#!/usr/bin/env python3
"""Makes pages from what suite.py measured: NAME.html (one file, pictures inside, no network) and NAME.md.

    report.py RESULT.json [--out FOLDER] [--readme README.md]

--readme also writes the rows that README.md states between its two `benchmarks` marks. The same input gives the same bytes.
Pictures need matplotlib; without it the page has its tables and says so.
"""

import argparse
import html
import io
import json
import math
import os
import pathlib
import re
import sys
import warnings

CHAPTERS = {
    "precision": ("Precision", "What a lower precision buys."),
    "overhead": ("Overhead", "What the loop itself costs, where there is next to nothing to train."),
    "counted": ("Counted", "What a step does, counted: these do not depend on the load of the machine."),
    "lever": ("Levers", "One saving at a time."),
    "peer": ("Peers", "The same training in other loops."),
    "update": ("Update", "The optimizer's step alone."),
    "checkpoint": ("Checkpoints", "What saving costs."),
    "prober": ("Batch size", "Finding the largest batch that fits."),
    "batches": ("Batches", "Getting the next batch."),
    "target": ("Time to target", "Training until a given quality, not for a given number of steps."),
    "together": ("Together", "Everything that helps, at once."),
}
README_CHAPTERS = ("precision", "update", "peer", "together", "checkpoint")
HOW_TO_READ = ("A ratio is the baseline over ours, in time or in what is counted: above 1, ours takes less. Brackets hold its "
               "10–90 % range over the pairs that were measured; a goal is met when the ratio reaches it or it lies in that range.")
NO_PICTURES = "Pictures are missing: matplotlib could not be imported. This installs it:"
HOW_TO_GET_PICTURES = "bash cmake/dev.sh bench-peers"
NOTHING = "–"


# ---- what was measured -------------------------------------------------------------------------------------------------


def clean(value):
    """The same value, with no character in it that cannot be shown."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "\ufffd" if "\ud800" <= c <= "\udfff" else " " for c in value)
    if isinstance(value, list):
        return [clean(v) for v in value]
    if isinstance(value, dict):
        return {clean(k): clean(v) for k, v in value.items()}
    return value


class Result:
    """A result file whose lists are there, whatever the file lacks."""

    def __init__(self, data):
        if not isinstance(data, dict) or data.get("schema") != 1:
            raise ValueError("this is no result of suite.py in schema 1")
        self.data = data = clean(data)
        for name in ("machine", "versions"):
            setattr(self, name, data.get(name) or {})
        for name in ("ceilings", "records", "speeds", "counts", "curves", "memory", "micro", "left_out"):
            setattr(self, name, [item for item in data.get(name) or [] if isinstance(item, dict)])

    def chapters(self):
        """Names of the chapters that have records: the known ones in their order, then others."""
        there = list(dict.fromkeys(chapter_of(record) for record in self.records))
        return [c for c in CHAPTERS if c in there] + [c for c in there if c not in CHAPTERS]

    def of(self, chapter):
        return [record for record in self.records if chapter_of(record) == chapter]

    def ceiling(self, name, threads):
        for ceiling in self.ceilings:
            if ceiling.get("name") == name and ceiling.get("threads") == threads:
                return real(ceiling.get("value"))
        return None


def name_of(record):
    return str(record.get("name") or "(no name)")


def chapter_of(record):
    return name_of(record).split("/", 1)[0]


def within_chapter(record):
    return name_of(record).split("/", 1)[-1]


def title_of(chapter):
    return CHAPTERS.get(chapter, (chapter, ""))[0]


# ---- numbers in words --------------------------------------------------------------------------------------------------


def real(value):
    """A finite number, or None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None


def digits(value, count=3):
    """So many significant digits, without an exponent between a thousandth and a million."""
    value = real(value)
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if not -4 < exponent < 6:
        return f"{value:.{count - 1}e}"
    return f"{value:,.{max(0, count - 1 - exponent)}f}"


def scaled(value, unit, steps, count=3):
    value = real(value)
    if value is None:
        return NOTHING
    for factor, prefix in steps:
        if abs(value) >= factor:
            break
    return f"{digits(value / factor, count)} {prefix}{unit}"


LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))
SMALL = ((1, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
BINARY = ((2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki"), (1, ""))


def rate(value, unit):
    return scaled(value, {"byte/s": "B/s"}.get(unit, unit or ""), LARGE)


def size(value):
    return scaled(value, "B", BINARY)


def duration(value, unit):
    unit = str(unit or "s")
    if unit == "s" or unit.startswith("s/"):
        return scaled(value, unit, SMALL)
    return NOTHING if real(value) is None else f"{digits(value)} {unit}"


def percent(value):
    return NOTHING if real(value) is None else f"{value * 100:.0f} %"


def count(value):
    value = real(value)
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value == int(value) else digits(value)


def ratio_of(record):
    ratio = real(record.get("ratio"))
    if ratio is None:
        return "not measured"
    low, high = real(record.get("low")), real(record.get("high"))
    if low is None or high is None:
        return digits(ratio)
    return f"{digits(ratio)} [{digits(low)}, {digits(high)}]"


def verdict(record):
    """met, unmet, none (there is no goal), or missing (there is no measurement)."""
    if real(record.get("ratio")) is None:
        return "missing"
    if record.get("met") is None and real(record.get("goal")) is not None:
        return "undecided"
    if record.get("met") is None or real(record.get("goal")) is None:
        return "none"
    return "met" if record["met"] else "unmet"


VERDICTS = {"met": "✓ met", "unmet": "✗ not met", "none": "no goal", "missing": "not measured",
            "undecided": "not decided"}


def listed(words):
    words = [w for w in words if w]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else ""


def counted(number, noun):
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


def threads_words(threads):
    return "device" if real(threads) is None else counted(threads, "thread")


def machine_sentence(result):
    machine = result.machine
    gpu = machine.get("gpu") or {}
    parts = [str(machine.get("processor") or "an unnamed processor")]
    if real(machine.get("cores")) is not None:
        parts.append(counted(machine["cores"], "core"))
    if real(machine.get("memory_bytes")) is not None:
        parts.append(f"{size(machine['memory_bytes'])} of memory")
    if gpu:
        about = [f"driver {gpu['driver']}" if gpu.get("driver") else "", f"{gpu['clock_mhz']} MHz" if gpu.get("clock_mhz") else ""]
        about = ", ".join(a for a in about if a)
        parts.append(f"GPU {gpu.get('name') or 'unnamed'}" + (f" ({about})" if about else ""))
    else:
        parts.append("no GPU")
    flags = machine.get("flags")
    if isinstance(flags, list) and flags:
        parts.append("with " + listed([str(flag) for flag in flags]))
    for key, what in (("kernel", "kernel {}"), ("governor", "governor {}"), ("load", "{}")):
        if machine.get(key):
            parts.append(what.format(machine[key]))
    return "Measured on " + ", ".join(parts) + f", {versions_words(result)}."


def versions_words(result):
    return "with " + (listed([f"{name} {version}" for name, version in result.versions.items() if version]) or "unnamed versions")


def run_words(result):
    """When, how long, in which mode."""
    data = result.data
    words = [f"{data['mode']} mode" if data.get("mode") else "", f"started {data['started']}" if data.get("started") else "",
             f"{digits(data['minutes'])} minutes" if real(data.get("minutes")) is not None else ""]
    return ", ".join(w for w in words if w)


# ---- tables, the same for both pages -----------------------------------------------------------------------------------
# A cell is a string or a list of parts; a part is a string or (kind, string) with the kinds small, code and the verdicts.


class Table:
    def __init__(self, caption, columns, rows):
        self.caption, self.rows = caption, rows
        self.columns = [column.rstrip("#") for column in columns]  # `#` marks a column of numbers
        self.numbers = [column.endswith("#") for column in columns]


def parts_of(cell):
    parts = cell if isinstance(cell, list) else [cell]
    return [part if isinstance(part, tuple) else ("", str(part)) for part in parts if part not in ("", None)]


def text_or_nothing(value):
    return NOTHING if value is None or value == "" else str(value)


def ceilings_table(result):
    columns, rows = list(dict.fromkeys(threads_words(c.get("threads")) for c in result.ceilings)), {}
    for c in result.ceilings:
        row = rows.setdefault(str(c.get("name") or NOTHING), [NOTHING] * len(columns))
        row[columns.index(threads_words(c.get("threads")))] = rate(c.get("value"), c.get("unit"))
    return Table("What the machine can do at best, as measured here", ["ceiling"] + [column + "#" for column in columns],
                 [[name, *row] for name, row in rows.items()])


def summary_table(result):
    rows = []
    for chapter in result.chapters():
        kinds = [verdict(record) for record in result.of(chapter)]
        rows.append([title_of(chapter)] + [str(kinds.count(kind)) for kind in VERDICTS])
    return Table("Rows of each chapter", ["chapter"] + [words + "#" for words in VERDICTS.values()], rows)


def unmet_table(result):
    rows = [[name_of(r), ratio_of(r), digits(r.get("goal")), ("small", text_or_nothing(r.get("note")))]
            for r in result.records if verdict(r) == "unmet"]
    return Table("Goals that were not met", ["row", "ratio [range]#", "goal#", "note"], rows)


def chapter_table(result, chapter):
    rows = []
    for r in result.of(chapter):
        pairs = real(r.get("pairs"))
        measured = "" if pairs is None else counted(pairs, "pair")
        if measured and real(r.get("dropped")):
            measured += f", {count(r['dropped'])} dropped"
        difference = real(r.get("weights_difference"))
        same = [f"weights differ by {digits(difference, 2)}" if difference is not None else "", str(r.get("tolerance") or "")]
        same = "; ".join(words for words in same if words)
        rows.append([
            [within_chapter(r), ("small", r["note"]) if r.get("note") else ""],
            [ratio_of(r), ("small", measured) if measured else ""],
            digits(r.get("goal")),
            (verdict(r), VERDICTS[verdict(r)]),
            [duration(r.get("ours"), r.get("unit")), ("small", r["ours_is"]) if r.get("ours_is") else ""],
            [duration(r.get("baseline"), r.get("unit")), ("small", r["baseline_is"]) if r.get("baseline_is") else ""],
            percent(r.get("ceiling_fraction")),
            [f"{digits(r.get('loss'), 4)} / {digits(r.get('baseline_loss'), 4)}", ("small", same) if same else ""],
            ("code", r["rerun"]) if r.get("rerun") else NOTHING,
        ])
    return Table(f"{title_of(chapter)}: every row",
                 ["row", "ratio [range]#", "goal#", "met", "ours", "baseline", "of the ceiling#", "loss, ours / baseline",
                  "measure this row again"], rows)


def speeds_table(result):
    rows = [[text_or_nothing(s.get("workload")), text_or_nothing(s.get("loop")), text_or_nothing(s.get("precision")),
             count(s.get("threads")), digits(s.get("steps_per_second")), digits(s.get("samples_per_second")),
             size(s.get("peak_bytes")), digits(s.get("loss"), 4), digits(s.get("fp32_loss"), 4)] for s in result.speeds]
    return Table("Speed of each loop", ["workload", "loop", "precision", "threads#", "steps/s#", "samples/s#", "peak memory#",
                                        "loss#", "loss in FP32#"], rows)


def curves_table(result):
    rows = []
    for c in result.curves:
        points = points_of(c.get("seconds"), c.get("loss"))
        last = points[-1] if points else (None, None)
        rows.append([text_or_nothing(c.get("group")), text_or_nothing(c.get("label")), text_or_nothing(c.get("precision")),
                     str(len(points)), duration(last[0], "s"), digits(last[1], 4)])
    return Table("Loss over time: where each run ended", ["group", "run", "precision", "points#", "time#", "loss#"], rows)


def memory_table(result):
    rows = [[text_or_nothing(m.get("workload")), text_or_nothing(m.get("precision")), count(m.get("batch")),
             size(m.get("peak_bytes"))] for m in result.memory]
    return Table("Peak memory of a training step", ["workload", "precision", "batch#", "peak memory#"], rows)


def counts_table(result):
    columns = ["allocations", "operators", "casts", "reads", "instructions"]
    rows = [[text_or_nothing(c.get("name"))] + [count(c.get(column)) for column in columns] for c in result.counts]
    return Table("Counted, per step", ["loop"] + [column + "#" for column in columns], rows)


def micro_table(result):
    columns = list(dict.fromkeys(key for item in result.micro for key in item if key != "name"))
    rows = [[text_or_nothing(item.get("name"))] + [count(item.get(c)) if real(item.get(c)) is not None else text_or_nothing(item.get(c))
                                                   for c in columns] for item in result.micro]
    return Table("Single operations", ["operation"] + [column + "#" for column in columns], rows)


def left_out_table(result):
    rows = [[text_or_nothing(item.get("name")), text_or_nothing(item.get("reason"))] for item in result.left_out]
    return Table("Not measured here, and why", ["rows", "why"], rows)


def goals_sentence(result):
    kinds = [verdict(record) for record in result.records]
    met, unmet = kinds.count("met"), kinds.count("unmet")
    undecided = kinds.count("undecided")
    words = [f"{met} of {counted(met + unmet, 'goal')} met"] if met + unmet else []
    if undecided:
        words.append(f"{counted(undecided, 'goal')} not decided, the machine was busy")
    if not words:
        words.append("No goal was set for what could be measured")
    if result.data.get("interrupted") is True:
        words.append("the measuring was interrupted")
    if kinds.count("none"):
        words.append(f"{counted(kinds.count('none'), 'row')} without a goal")
    if kinds.count("missing"):
        words.append(f"{counted(kinds.count('missing'), 'row')} could not be measured")
    return ", ".join(words) + "."


def points_of(xs, ys):
    """Pairs of numbers; what is null on either side is left out."""
    pairs = ((real(x), real(y)) for x, y in zip(xs or [], ys or []))
    return [(x, y) for x, y in pairs if x is not None and y is not None]


# ---- pictures ----------------------------------------------------------------------------------------------------------
# They are drawn in marker colours, which become the page's CSS variables: one picture serves light and dark.

INK, MUTED, GRID, MET, UNMET, NONE = "#010101", "#010102", "#010103", "#010104", "#010105", "#010106"
SERIES = ["#010107", "#010108", "#010109", "#01010a", "#01010b"]
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", MET: "met", UNMET: "unmet", NONE: "none",
             **{colour: f"series{i + 1}" for i, colour in enumerate(SERIES)}}
LOOKS = {"met": (MET, "o"), "unmet": (UNMET, "X"), "none": (NONE, "s"), "undecided": (NONE, "D")}


class Picture:
    def __init__(self, svg, words, caption):
        self.svg, self.words, self.caption = svg, words, caption


class Pictures:
    """Everything that needs matplotlib."""

    def __init__(self):
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

        self.figure_class, self.line, self.formatter, self.settings = Figure, Line2D, FuncFormatter, matplotlib.rc_context
        self.null_formatter, self.null_locator = NullFormatter, NullLocator
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({
            "svg.fonttype": "none", "text.parse_math": False, "font.size": 10,
            "axes.edgecolor": MUTED, "axes.labelcolor": INK, "axes.titlecolor": INK, "axes.titlesize": 11,
            "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
            "grid.color": GRID, "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
            "text.color": INK, "legend.frameon": False, "legend.labelcolor": INK, "lines.linewidth": 1.6})

    def figure(self, width, height, rows=1, columns=1, **more):
        figure = self.figure_class(figsize=(width, height))
        return figure, figure.subplots(rows, columns, **{"squeeze": False, **more})

    def svg(self, figure, words):
        buffer = io.StringIO()
        # Names within a picture are hashes of a salt: random unless set, and unlike those of the other pictures on the page.
        with self.settings({"svg.hashsalt": words}), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a glyph that matplotlib's font lacks: the browser has others
            figure.savefig(buffer, format="svg", bbox_inches="tight", pad_inches=0.05, transparent=True,
                           metadata={"Date": None, "Creator": None})
        text = buffer.getvalue()
        text = text[text.index("<svg"):]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
        text = re.sub(r'<g id="[^"]*"', "<g", text)  # every picture has a figure_1; they share one page
        for colour, variable in VARIABLES.items():
            text = re.sub(rf"\b(fill|stroke): {colour}\b", rf"\1: var(--{variable})", text)
        width = re.search(r'viewBox="0 0 ([\d.]+)', text).group(1)
        label = html.escape(words, quote=True)
        text = re.sub(r"<svg\b[^>]*?(viewBox=\"[^\"]*\")[^>]*>",
                      lambda m: f'<svg role="img" aria-label="{label}" {m[1]} style="width: {float(width) * 1.33:.0f}px" '
                                'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">', text, count=1)
        return "\n".join(line.rstrip() for line in text.strip().splitlines() if line.strip())

    def log_axis(self, axis, ticks, words):
        """Ticks where they are wanted, in words: matplotlib's own are mathematics, which text.parse_math has switched off."""
        axis.set_ticks(ticks)
        axis.set_major_formatter(self.formatter(lambda value, _: words(value)))
        axis.set_minor_locator(self.null_locator())
        axis.set_minor_formatter(self.null_formatter())

    def speed_up(self, result, chapter):
        records = [r for r in result.of(chapter) if real(r.get("ratio")) is not None and r["ratio"] > 0]
        if not records:
            return None
        figure, axes = self.figure(8.5, 1.1 + 0.33 * len(records))
        axes = axes[0][0]
        numbers = [v for r in records for v in map(real, (r["ratio"], r.get("low"), r.get("high"), r.get("goal"))) if v and v > 0]
        least, most = min(numbers + [1]), max(numbers + [1])
        logarithmic = most / least > 12
        if logarithmic:
            axes.set_xscale("log")
            axes.set_xlim(least / 1.3, most * 2.2)
            ticks = [m * 10.0**e for e in range(-9, 10) for m in (1, 2, 5)]
            ticks = [t for t in ticks if least / 1.3 <= t <= most * 1.4]
            self.log_axis(axes.xaxis, ticks if len(ticks) < 12 else [t for t in ticks if math.log10(t) % 1 < 1e-9], "{:g}".format)
        else:
            axes.set_xlim(0, most * 1.22)
        for y, record in enumerate(records):
            self.bar(axes, y, record, 1 if logarithmic else 0)
        axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=3)
        axes.set_yticks(range(len(records)), [short(within_chapter(r)) for r in records])
        axes.set_ylim(len(records) - 0.4, -0.6)
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("ratio: baseline over ours" + (" (logarithmic)" if logarithmic else ""))
        kinds = {verdict(r) for r in records}
        handles = [self.line([], [], color=c, marker=m, linestyle="", label=VERDICTS[k].split(" ", 1)[-1] if k in ("met", "unmet") else VERDICTS[k])
                   for k, (c, m) in LOOKS.items() if k in kinds]
        if kinds & {"met", "unmet"}:
            handles.append(self.line([], [], color=INK, marker="|", markersize=11, markeredgewidth=2.5, linestyle="", label="goal"))
        handles.append(self.line([], [], color=INK, linewidth=1, linestyle=(0, (4, 3)), label="1: as the baseline"))
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(handles), fontsize=9, borderaxespad=0.2,
                    handletextpad=0.4, columnspacing=1.4)
        words = f"Bars of the ratios in {title_of(chapter)}: " + "; ".join(
            f"{within_chapter(r)} {ratio_of(r)}, {VERDICTS[verdict(r)].lstrip('✓✗ ')}" for r in records) + "."
        return Picture(self.svg(figure, words), words, "Bars: the ratio. Thin lines: its 10–90 % range.")

    def bar(self, axes, y, record, base):
        colour, marker = LOOKS[verdict(record)]
        ratio, goal = record["ratio"], real(record.get("goal"))
        hollow = verdict(record) == "unmet"
        axes.barh(y, ratio - base, left=base, height=0.62, color=colour, alpha=0.18 if hollow else 0.45, linewidth=0)
        axes.barh(y, ratio - base, left=base, height=0.62, fill=False, edgecolor=colour, linestyle="--" if hollow else "-", linewidth=1)
        low, high = real(record.get("low")), real(record.get("high"))
        end = ratio
        if low is not None and high is not None:
            axes.errorbar(ratio, y, xerr=[[max(0, ratio - low)], [max(0, high - ratio)]], color=INK, linewidth=1.2, capsize=3, zorder=4)
            end = max(ratio, high)
        axes.plot(ratio, y, marker=marker, color=colour, markersize=7, markeredgecolor=INK, markeredgewidth=0.6, zorder=5)
        if goal is not None:
            axes.plot(goal, y, marker="|", color=INK, markersize=17, markeredgewidth=2.5, zorder=4)
            end = max(end, goal)
        mark = {"met": " ✓", "unmet": " ✗"}.get(verdict(record), "")
        axes.annotate(f"{digits(ratio)}×{mark}", (end, y), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9)

    def roofline(self, result):
        """One row of two panels for each number of threads: the roofs, and how near to them the workloads come."""
        roofs = {}
        for c in result.ceilings:
            what, _, name = str(c.get("name") or "").partition("/")
            if what in ("matmul", "memory") and (real(c.get("value")) or 0) > 0:
                roofs.setdefault(c.get("threads"), {}).setdefault(what, {})[name] = c["value"]
        roofs = {threads: kinds for threads, kinds in roofs.items() if kinds.get("matmul")}
        if not roofs:
            return None
        achieved = {threads: achieved_of(result, threads) for threads in roofs}
        figure, grid = self.figure(10, 3.9 * len(roofs), len(roofs), 2, sharey="row")
        figure.subplots_adjust(hspace=0.5, wspace=0.06)
        words = []
        names = list(dict.fromkeys(name for kinds in roofs.values() for name in kinds["matmul"]))
        for (left, right), (threads, kinds) in zip(grid, roofs.items()):
            self.roofs(left, kinds, names)
            self.reached(right, achieved[threads], kinds["matmul"], names)
            title = threads_words(threads)
            left.set_title(f"Ceilings, {title}", loc="left")
            right.set_title("reached by the workloads", loc="left")
            words.append(f"{title}: " + ", ".join(f"{n} {rate(v, 'FLOP/s')}" for n, v in kinds["matmul"].items()) + "; " + (", ".join(
                f"{w} in {p} {rate(v, 'FLOP/s')} ({percent(f)})" for w, p, v, f in achieved[threads]) or "no workload was placed"))
        return Picture(self.svg(figure, "Roofline. " + ". ".join(words) + "."), " ".join(words),
                       "Left: the rate that the machine allows, by the work done on each byte that is moved; sloped where memory is "
                       "the limit, flat where arithmetic is. Right: the rates that the workloads reached, with their fraction of "
                       "the flat ceiling of their precision (dotted).")

    def roofs(self, axes, kinds, names):
        bandwidth = max(kinds.get("memory", {}).values(), default=None)
        flats = kinds["matmul"]
        ridges = [flat / bandwidth for flat in flats.values()] if bandwidth else [8]
        first = 2.0 ** math.floor(math.log2(min(ridges) / 24))
        last = 2.0 ** math.ceil(math.log2(max(ridges) * 24))
        for name, flat in flats.items():
            colour, style, _ = look_of(name, names)
            ridge = flat / bandwidth if bandwidth else first
            start = [first * bandwidth] if bandwidth else []
            axes.plot(([first] if bandwidth else []) + [ridge, last], start + [flat, flat], color=colour, linestyle=style,
                      label=f"{name} {rate(flat, 'FLOP/s')}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(first, last)
        if bandwidth:
            axes.plot([], [], linestyle="", label=f"slope: memory {rate(bandwidth, 'byte/s')}")
        exponents = range(int(math.log2(first)), int(math.log2(last)) + 1, 2)
        self.log_axis(axes.xaxis, [2.0**e for e in exponents], lambda v: f"{v:g}" if v >= 1 else f"1/{1 / v:g}")
        axes.legend(loc="lower right", fontsize=9)
        axes.set_xlabel("FLOP per byte moved (logarithmic)")
        axes.set_ylabel("FLOP/s (logarithmic)")

    def reached(self, axes, achieved, flats, names):
        workloads = list(dict.fromkeys(workload for workload, _, _, _ in achieved))
        for name, flat in flats.items():
            axes.axhline(flat, color=look_of(name, names)[0], linestyle=":", linewidth=1)
        precisions = list(dict.fromkeys(precision for _, precision, _, _ in achieved))
        for workload, precision, value, fraction in achieved:
            colour, _, marker = look_of(precision, names)
            shift = (precisions.index(precision) - (len(precisions) - 1) / 2) * 0.22
            x = workloads.index(workload) + shift
            axes.plot(x, value, marker=marker, color=colour, markersize=7, linestyle="")
            axes.annotate(percent(fraction).replace(" ", ""), (x, value), xytext=(0, -13), textcoords="offset points", ha="center",
                          fontsize=8)
        lowest = min([value for _, _, value, _ in achieved] + list(flats.values()))
        bottom = min(axes.get_ylim()[0], 10.0 ** math.floor(math.log10(lowest / 2)))
        top = max(flats.values()) * 3
        axes.set_ylim(bottom, top)
        exponents = range(math.ceil(math.log10(bottom) - 1e-9), math.floor(math.log10(top)) + 1)
        self.log_axis(axes.yaxis, [10.0**e for e in exponents], lambda v: rate(v, ""))
        tilt = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if sum(map(len, workloads)) > 18 else {}
        axes.set_xticks(range(len(workloads)), [short(w, 14) for w in workloads], **tilt)
        axes.set_xlim(-0.6, max(len(workloads), 1) - 0.4)
        axes.tick_params(axis="y", length=0, labelleft=False)
        axes.grid(False, axis="x")
        if not workloads:
            axes.annotate("none was placed", (0.5, 0.5), xycoords="axes fraction", ha="center", color=MUTED)
        handles = [self.line([], [], color=look_of(p, names)[0], marker=look_of(p, names)[2], linestyle="", label=p) for p in precisions]
        if handles:
            axes.legend(handles=handles, loc="lower right", fontsize=9)

    def panels(self, groups, number):
        """Small multiples in two columns: a figure and its axes, unused ones taken away."""
        columns = min(2, len(groups))
        rows = -(-len(groups) // columns)
        figure, grid = self.figure(4.4 * columns + 0.6, number * rows, rows, columns)
        figure.subplots_adjust(hspace=0.45, wspace=0.28)
        axes = [a for row in grid for a in row]
        for unused in axes[len(groups):]:
            unused.remove()
        return figure, axes

    def legend(self, figure, axes, names, all_names, markers):
        handles = [self.line([], [], color=look_of(n, all_names)[0], linestyle=look_of(n, all_names)[1],
                             marker=look_of(n, all_names)[2] if markers else "", label=n) for n in names]
        axes.legend(handles=handles, fontsize=9)

    def curves(self, result):
        groups = {}
        for curve in result.curves:
            points = points_of(curve.get("seconds"), curve.get("loss"))
            if points:
                groups.setdefault(str(curve.get("group") or ""), []).append((str(curve.get("precision") or "?"), curve, points))
        if not groups:
            return None
        names = list(dict.fromkeys(p for runs in groups.values() for p, _, _ in runs))
        figure, axes = self.panels(groups, 3.3)
        words = []
        for axis, (group, runs) in zip(axes, groups.items()):
            for precision, _, points in runs:
                colour, style, _ = look_of(precision, names)
                axis.plot(*zip(*points), color=colour, linestyle=style, linewidth=1.3, alpha=0.85,
                          marker="." if len(points) < 3 else "")
            axis.set_title(short(group), loc="left")
            axis.set_xlabel("seconds of training")
            axis.set_ylabel("loss")
            self.legend(figure, axis, dict.fromkeys(p for p, _, _ in runs), names, False)
            words += [f"{group}, {curve.get('label') or p}: {digits(points[-1][1], 4)} after {duration(points[-1][0], 's')}"
                      for p, curve, points in runs]
        return Picture(self.svg(figure, "Loss over time. " + "; ".join(words) + "."), "",
                       "Loss over the seconds of training, one line for each run.")

    def memory(self, result):
        groups = {}
        for item in result.memory:
            batch, peak = real(item.get("batch")), real(item.get("peak_bytes"))
            if batch and peak is not None and batch > 0:
                lines = groups.setdefault(str(item.get("workload") or ""), {})
                lines.setdefault(str(item.get("precision") or "?"), []).append((batch, peak))
        if not groups:
            return None
        names = list(dict.fromkeys(p for lines in groups.values() for p in lines))
        figure, axes = self.panels(groups, 3)
        words = []
        for axis, (workload, lines) in zip(axes, groups.items()):
            for precision, points in lines.items():
                colour, style, marker = look_of(precision, names)
                axis.plot(*zip(*sorted(points)), color=colour, linestyle=style, marker=marker, markersize=5)
                words += [f"{workload} in {precision}, batch {count(b)}: {size(p)}" for b, p in sorted(points)]
            axis.set_xscale("log", base=2)
            batches = sorted({b for points in lines.values() for b, _ in points})
            self.log_axis(axis.xaxis, batches if len(batches) < 9 else batches[::2], count)
            axis.set_ylim(0, max(p for points in lines.values() for _, p in points) * 1.1 or 1)
            axis.yaxis.set_major_formatter(self.formatter(lambda value, _: size(value) if value else "0"))
            axis.set_title(short(workload), loc="left")
            axis.set_xlabel("batch (logarithmic)")
            axis.set_ylabel("peak memory")
            self.legend(figure, axis, lines, names, True)
        return Picture(self.svg(figure, "Peak memory against batch size. " + "; ".join(words) + "."), "",
                       "Peak memory of a training step against its batch size.")


def look_of(precision, names):
    """Colour, line and marker of a precision: the usual ones always have the same."""
    usual = ["fp32", "bf16", "fp16", "tf32"]
    order = usual + [name for name in names if name not in usual]
    i = order.index(precision) if precision in order else len(order)
    return SERIES[i % len(SERIES)], ["-", "--", "-.", ":"][i % 4], "osD^vP"[i % 6]


def short(text, limit=44):
    return text if len(text) <= limit else text[: limit - 1] + "…"


def achieved_of(result, threads):
    """(workload, precision, FLOP/s, fraction): the best row of each that states its fraction of a matmul ceiling."""
    best = {}
    for r in result.records:
        fraction, flat = real(r.get("ceiling_fraction")), result.ceiling(f"matmul/{r.get('precision')}", threads)
        if r.get("threads") != threads or not fraction or fraction < 0 or not flat or not str(r.get("unit", "s")).startswith("s"):
            continue
        if chapter_of(r) in ("checkpoint", "batches", "prober", "update"):
            continue  # their ceilings are others
        key = str(r.get("workload") or NOTHING), str(r.get("precision"))
        best[key] = max(best.get(key, 0), fraction)
    return [(w, p, f * result.ceiling(f"matmul/{p}", threads), f) for (w, p), f in best.items()]


def pictures_or_none():
    try:
        return Pictures()
    except Exception:  # a matplotlib that does not fit its numpy fails in other ways than ImportError
        return None


# ---- the page ----------------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --page: #fdfdfc; --panel: #f3f3f0; --ink: #1d1f21; --muted: #62676d; --grid: #e2e2de;
  --met: #0b7a4b; --unmet: #b8420f; --none: #6a7078; --link: #0b5cad;
  --series1: #2563ab; --series2: #c2570c; --series3: #0d7a5f; --series4: #8a3fa0; --series5: #6b6b2a; }
@media (prefers-color-scheme: dark) { :root { --page: #16181a; --panel: #202326; --ink: #e8e8e5; --muted: #a0a6ad; --grid: #33373b;
  --met: #4fc38a; --unmet: #f08a55; --none: #9aa1a9; --link: #7db5f0;
  --series1: #74aef2; --series2: #f2a060; --series3: #5fd0ae; --series4: #cf95e2; --series5: #cfcf7c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 92rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .75rem; }
h2 { font-size: 1.35rem; margin: 3rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--grid); }
p { max-width: 46rem; margin: .5rem 0 1rem; }
p.lead { font-size: 1.1rem; }
p.verdict { font-size: 1.25rem; font-weight: 600; }
a { color: var(--link); }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; margin: 1rem 0; list-style: none; }
.scroll { overflow-x: auto; margin: 1rem 0; }
.scroll:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .875rem; line-height: 1.4; font-variant-numeric: tabular-nums; }
caption { text-align: left; white-space: nowrap; color: var(--muted); padding: 0 0 .4rem; }
th, td { padding: .45rem .8rem .45rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); }
thead th { color: var(--muted); font-weight: 600; vertical-align: bottom; border-bottom: 2px solid var(--muted); }
tbody th { font-weight: 600; overflow-wrap: break-word; min-width: 9rem; }
.number { text-align: right; white-space: nowrap; }
td small, th small { display: block; color: var(--muted); font-weight: 400; font-size: .8rem; min-width: 9rem; white-space: normal; }
.number small { min-width: 0; }
code { font: .8rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--panel); padding: .1rem .3rem;
  border-radius: 3px; overflow-wrap: anywhere; }
td code { display: inline-block; min-width: 20rem; }
.met, .unmet { font-weight: 600; white-space: nowrap; } .met { color: var(--met); } .unmet { color: var(--unmet); }
.none, .missing { color: var(--muted); white-space: nowrap; }
figure { margin: 1.25rem 0; } figure .scroll { margin: 0 0 .4rem; }
figcaption { color: var(--muted); font-size: .875rem; max-width: 46rem; }
svg { display: block; height: auto; max-width: 100%; min-width: 34rem; } svg text { font-family: inherit !important; }
.notice { background: var(--panel); border-left: 4px solid var(--unmet); padding: .6rem 1rem; max-width: 46rem; }
@media print { body { max-width: none; } .scroll { overflow: visible; } }
"""


def escape(text):
    return html.escape(str(text), quote=True)


def html_part(kind, text):
    if kind == "small":
        return f"<small>{escape(text)}</small>"
    if kind == "code":
        return f"<code>{escape(text)}</code>"
    return f'<span class="{kind}">{escape(text)}</span>' if kind else escape(text)


def html_cell(cell, tag, number):
    inside = " ".join(html_part(*part) for part in parts_of(cell)) or NOTHING
    if "row" in tag:
        inside = re.sub("(?<!<)/", "/<wbr>", inside)  # names break at their slashes
    return f"<{tag}{' class=number' if number else ''}>{inside}</{tag.split()[0]}>"


def html_table(table):
    if not table.rows:
        return []
    head = "".join(html_cell(column, 'th scope="col"', number) for column, number in zip(table.columns, table.numbers))
    lines = [f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(table.caption)}"><table>',
             f"<caption>{escape(table.caption)}</caption>", f"<thead><tr>{head}</tr></thead>", "<tbody>"]
    for row in table.rows:
        cells = [html_cell(row[0], 'th scope="row"', False)]
        cells += [html_cell(cell, "td", number) for cell, number in zip(row[1:], table.numbers[1:])]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return lines + ["</tbody></table></div>"]


def html_picture(picture):
    if picture is None:
        return []
    return ['<figure><div class="scroll" role="region" tabindex="0" aria-label="Picture">', picture.svg, "</div>",
            f"<figcaption>{escape(picture.caption)}</figcaption></figure>"]


def sections(result, pictures):
    """(anchor, title, sentence, picture, tables) in the order of the page; those with nothing to show are left out."""
    draw = lambda name, *more: getattr(pictures, name)(result, *more) if pictures else None
    made = [("ceilings", "Ceilings", "What this machine can do at best: no loop is faster than these.", None,
             [ceilings_table(result)]),
            ("summary", "What was met", f"{goals_sentence(result)} {HOW_TO_READ}", None, [summary_table(result), unmet_table(result)])]
    for number, chapter in enumerate(result.chapters(), 1):
        made.append((f"chapter-{number}", title_of(chapter), CHAPTERS.get(chapter, ("", ""))[1], draw("speed_up", chapter),
                     [chapter_table(result, chapter)]))
    made += [("roofline", "Roofline", "", draw("roofline"), []),
             ("speeds", "Speeds", "", None, [speeds_table(result)]),
             ("curves", "Loss over time", "FP32 against mixed precision.", draw("curves"), [curves_table(result)]),
             ("memory", "Memory", "", draw("memory"), [memory_table(result)]),
             ("counts", "Counts", "These do not depend on the load of the machine.", None, [counts_table(result)]),
             ("micro", "Single operations", "", None, [micro_table(result)]),
             ("left-out", "Left out", "", None, [left_out_table(result)])]
    return [s for s in made if s[0] == "summary" or s[3] is not None or any(table.rows for table in s[4])]


def html_page(result, pictures):
    parts = sections(result, pictures)
    lines = ["<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
             '<meta name="viewport" content="width=device-width, initial-scale=1">', "<title>frugal: benchmarks</title>",
             f"<style>{STYLE}</style>", "</head>", "<body>", "<main>", "<h1>frugal: benchmarks</h1>",
             f'<p class="lead">{escape(machine_sentence(result))}</p>']
    if run_words(result):
        lines.append(f"<p>{escape(run_words(result)[:1].upper() + run_words(result)[1:])}.</p>")
    if result.data.get("command"):
        lines.append(f"<p>Measured by <code>{escape(result.data['command'])}</code></p>")
    if pictures is None:
        lines.append(f'<p class="notice">{escape(NO_PICTURES)} <code>{escape(HOW_TO_GET_PICTURES)}</code></p>')
    lines.append('<nav aria-label="Sections"><ul>' + "".join(
        f'<li><a href="#{anchor}">{escape(title)}</a></li>' for anchor, title, _, _, _ in parts) + "</ul></nav>")
    for anchor, title, words, picture, tables in parts:
        lines.append(f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{escape(title)}</h2>')
        if anchor == "summary":
            lines += [f'<p class="verdict">{escape(goals_sentence(result))}</p>', f"<p>{escape(HOW_TO_READ)}</p>"]
        elif words:
            lines.append(f"<p>{escape(words)}</p>")
        lines += html_picture(picture)
        for table in tables:
            lines += html_table(table)
        lines.append("</section>")
    return "\n".join(lines + ["</main>", "</body>", "</html>"]) + "\n"


# ---- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(text):
    """Text that Markdown shows as it is, also within a table; `_` within a word and `[1, 2]` need no escape."""
    text = re.sub(r"([\\`*|#~$&])|(?<!\w)_|_(?!\w)|\](?=[(\[:])", r"\\\g<0>", str(text).replace("\n", " "))
    return text.replace("<", "&lt;").replace(">", "&gt;")  # no escape but this one keeps `<!--` from being a mark of ours


def markdown_code(text):
    text = str(text).replace("\n", " ")
    if "<!--" in text or "-->" in text:  # in code they cannot be escaped, and would pass for a mark
        return markdown(text)
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", "\\|")


def markdown_cell(cell):
    shown = [markdown_code(text) if kind == "code" else markdown(text) for kind, text in parts_of(cell)]
    return "; ".join(shown) or NOTHING


def markdown_table(columns, numbers, rows):
    return ["| " + " | ".join(columns) + " |", "|" + "|".join("---:" if number else "---" for number in numbers) + "|",
            *("| " + " | ".join(markdown_cell(cell) for cell in row) + " |" for row in rows)]


def markdown_page(result):
    lines = ["# frugal: benchmarks", "", markdown(machine_sentence(result)), ""]
    if run_words(result):
        lines += [markdown(run_words(result)[:1].upper() + run_words(result)[1:]) + ".", ""]
    if result.data.get("command"):
        lines += [f"Measured by {markdown_code(result.data['command'])}.", ""]
    for _, title, words, _, tables in sections(result, None):
        lines += [f"## {markdown(title)}", ""]
        if words:
            lines += [markdown(words), ""]
        for table in tables:
            if table.rows:
                lines += [f"{markdown(table.caption)}:", "",
                          *markdown_table([markdown(c) for c in table.columns], table.numbers, table.rows), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def readme_block(result):
    """What README.md states: the rows of some chapters that have a goal, all of the shortest ones, and what they were measured on."""
    chosen = [r for chapter in README_CHAPTERS for r in result.of(chapter)
              if real(r.get("goal")) is not None or chapter in ("checkpoint", "together")]
    rows = [[name_of(r), ratio_of(r), digits(r.get("goal")), VERDICTS[verdict(r)] if verdict(r) != "none" else NOTHING]
            for r in chosen if verdict(r) != "missing"]
    lines = []
    if result.data.get("command"):
        lines += [f"{markdown_code(result.data['command'])} measures this again. {HOW_TO_READ}", ""]
    else:
        lines += [HOW_TO_READ, ""]
    if rows:
        lines += [*markdown_table(["row", "ratio [low, high]", "goal", "met"], [False, True, True, False], rows), ""]
    if result.data.get("interrupted") is True:
        lines += ["The measuring was interrupted: rows are missing.", ""]
    missing = len(chosen) - len(rows)
    if missing:
        lines += [f"{counted(missing, 'row')} of these chapters could not be measured there; the report says why.", ""]
    return lines + [markdown(machine_sentence(result))]


def with_block(text, lines):
    """The text of README.md with those lines between its marks."""
    begin = re.search(r"<!-- benchmarks: begin.*?-->", text)
    end = re.search(r"<!-- benchmarks: end.*?-->", text[begin.end():]) if begin else None
    if not end:
        raise ValueError("there is no `<!-- benchmarks: begin ... -->` with a `<!-- benchmarks: end -->` after it")
    return text[: begin.end()] + "\n" + "\n".join(lines) + "\n" + text[begin.end() + end.start():]


# ---- files -------------------------------------------------------------------------------------------------------------


def write(path, text):
    """All of it or nothing."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_bytes(text.encode("utf-8"))
    os.replace(unfinished, path)
    print(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=pathlib.Path, help="what suite.py wrote")
    parser.add_argument("--out", type=pathlib.Path, help="the folder for the pages, that of RESULT.json unless given")
    parser.add_argument("--readme", type=pathlib.Path, help="also writes between the `benchmarks` marks of this file")
    options = parser.parse_args()

    try:
        result = Result(json.loads(options.result.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        sys.exit(f"{options.result}: {error}")
    pages = {"html": html_page(result, pictures_or_none()), "md": markdown_page(result)}
    readme = None
    if options.readme:
        try:
            readme = with_block(options.readme.read_text(encoding="utf-8"), readme_block(result))
        except (OSError, ValueError) as error:
            sys.exit(f"{options.readme}: {error}")

    out = options.out or options.result.parent
    out.mkdir(parents=True, exist_ok=True)
    for kind, text in pages.items():
        write(out / f"{options.result.stem}.{kind}", text)
    if readme is not None:
        write(options.readme, readme)


if __name__ == "__main__":
    main()
