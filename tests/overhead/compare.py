#!/usr/bin/env python3
"""Runs an overhead program under callgrind and compares the instructions per step of its loops.

    compare.py PROGRAM FOLDER CASE=LIMIT...

Every case has loops named hand and trainer: the Trainer may cost LIMIT instructions per step more than the loop that was
written by hand. `careless` is a hand loop with a mistake in it that must be seen, or the check is blind. `bare` keeps no
books at all and is shown for comparison. Exits with 77 where callgrind is missing: ctest reports that as skipped.
"""

import pathlib
import re
import shutil
import statistics
import subprocess
import sys


def instructions_per_step(program, folder):
    """{case: {loop: instructions per step}}, the median where a loop was measured several times."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder / 'out'}", program]
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if finished.returncode != 0:
        sys.exit(f"{finished.stdout}\n{' '.join(command)} failed with {finished.returncode}")
    found = {}
    for dump in folder.glob("out.*"):
        text = dump.read_text(errors="replace")
        label = re.search(r"^desc: Trigger: Client Request: (\S+) (\S+) (\d+)$", text, re.MULTILINE)
        total = re.search(r"^totals: (\d+)", text, re.MULTILINE)
        if label and total:
            case, loop, steps = label.groups()
            found.setdefault(case, {}).setdefault(loop, []).append(int(total.group(1)) / int(steps))
    return {case: {loop: statistics.median(costs) for loop, costs in loops.items()} for case, loops in found.items()}


def main():
    program, folder, *limits = sys.argv[1:]
    if shutil.which("valgrind") is None:
        print("skipped: valgrind is not installed, and callgrind is what counts the instructions")
        return 77
    costs = instructions_per_step(program, pathlib.Path(folder))
    if not costs:
        print("skipped: the program was built without <valgrind/callgrind.h>, so nothing was counted")
        return 77

    failed = False
    print(f"instructions per step   {'bare':>12}{'by hand':>12}{'Trainer':>12}{'more':>8}{'limit':>8}")
    for limit in limits:
        case, allowed = limit.split("=")
        loops = costs.get(case, {})
        if not {"hand", "trainer"} <= loops.keys():
            print(f"{case}: not measured")
            failed = True
            continue
        more = loops["trainer"] - loops["hand"]
        holds = more <= float(allowed)
        bare = f"{loops['bare']:.0f}" if "bare" in loops else "-"
        print(f"{case:<24}{bare:>12}{loops['hand']:>12.0f}{loops['trainer']:>12.0f}{more:>8.0f}{allowed:>8}"
              + ("" if holds else "   FAIL: the Trainer costs more than its limit"))
        failed |= not holds
        if "careless" in loops:
            seen = loops["careless"] - loops["hand"]
            print(f"  a careless loop: {seen:.0f} more" + (", seen" if seen > float(allowed) else ""))
            if seen <= float(allowed):
                print("  FAIL: a mistake of this size would not be seen")
                failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
