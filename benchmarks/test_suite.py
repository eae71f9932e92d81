#!/usr/bin/env python3
"""Tests of the runner: statistics, goals, dropped pairs, the comparison before the timing. Subjects are small scripts here."""

import json
import math
import pathlib
import sys
import tempfile
import textwrap
import types
import unittest

import rows
import suite

# A subject whose steps take a given time by its own clock, and whose weights are a given number.
FAKE = textwrap.dedent("""
    import json, sys
    seconds, value = float(sys.argv[1]), float(sys.argv[2])
    say = lambda answer: print(json.dumps(answer), flush=True)
    if value == 99:
        say({"error": "it cannot be made"})
        sys.exit(1)
    say({"subject": f"takes {seconds}", "versions": {"torch": "1"}, "work": {"flops": 100.0, "samples": 2}, "threads": 1})
    for line in sys.stdin:
        verb, *rest = line.split()
        if verb == "run":
            say({"seconds": seconds * int(rest[0])})
        elif verb == "check":
            open(rest[1], "w").write(sys.argv[2])
            say({"losses": [value]})
        elif verb == "compare":
            say({"difference": abs(value - float(open(rest[0]).read()))})
        elif verb == "memory":
            say({"peak": 5})
        else:
            say({"error": "unknown request"})
""")


class Fakes(suite.Suite):
    """A suite whose subjects are scripts, on a machine whose load is given."""

    def __init__(self, folder, loads=()):
        super().__init__(suite.parse(["--threads", "1", "--segment", "0.001", "--scratch", folder]))
        self.script = pathlib.Path(folder) / "fake.py"
        self.script.write_text(FAKE)
        self.native = {"fp32"}
        self.loads = list(loads)

    def command(self, side, threads, folder, program="subject"):
        return [sys.executable, str(self.script), *side["arguments"]]


def side(seconds, value=1.0):
    return {"program": "subject", "arguments": [str(seconds), str(value)], "label": "fake", "precision": "fp32"}


def row(ours, baseline, **more):
    return rows.Row("chapter/name", "W", "fp32", ours, baseline, **more)


class Statistics(unittest.TestCase):
    def test_quantiles_are_interpolated(self):
        self.assertEqual(suite.quantile([3, 1, 2], 0.5), 2)
        self.assertAlmostEqual(suite.quantile([0, 10], 0.1), 1)
        self.assertEqual(suite.quantile([7], 0.9), 7)

    def test_the_ratio_is_baseline_over_ours_pair_by_pair(self):
        found = suite.summary([(1, 2), (2, 2), (1, 3)])
        self.assertEqual(found["ratio"], 2)
        self.assertEqual((found["ours"], found["baseline"]), (1, 2))
        self.assertLess(found["low"], 2)
        self.assertGreater(found["high"], 2)

    def test_a_goal_is_met_when_reached_or_inside_the_range(self):
        self.assertIs(suite.is_met(2.1, 2.2, 2.0), True)
        self.assertIs(suite.is_met(1.9, 2.0, 2.0), True)
        self.assertIs(suite.is_met(1.8, 1.99, 2.0), False)
        self.assertIsNone(suite.is_met(None, None, 2.0))
        self.assertIsNone(suite.is_met(2.0, 2.0, None))


class Measuring(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.suite = Fakes(self.folder.name)
        self.addCleanup(self.suite.log.close)

    def test_a_record_has_every_key_and_the_right_ratio(self):
        record = self.suite.measure(row(side(0.001), side(0.003), goal=2.5), 1)
        self.assertAlmostEqual(record["ratio"], 3)
        self.assertIs(record["met"], True)
        self.assertGreaterEqual(record["pairs"], 20)
        self.assertEqual(record["weights_difference"], 0)
        self.assertIn("chapter/name/threads1", record["rerun"])
        for key in ("name", "workload", "precision", "threads", "ours", "baseline", "unit", "ratio", "low", "high",
                    "ceiling_fraction", "goal", "met"):
            self.assertIn(key, record)

    def test_a_wrong_result_is_never_timed(self):
        record = self.suite.measure(row(side(0.001, 2.0), side(0.003, 1.0)), 1)
        self.assertIsNone(record["ratio"])
        self.assertIn("differ after 8 steps", record["note"])

    def test_a_result_that_is_no_number_is_never_timed(self):
        record = self.suite.measure(row(side(0.001, float("nan")), side(0.003, 1.0)), 1)
        self.assertIsNone(record["ratio"])

    def test_what_cannot_be_made_is_said(self):
        record = self.suite.measure(row(side(0.001, 99), side(0.003)), 1)
        self.assertIsNone(record["ratio"])
        self.assertEqual(record["note"], "it cannot be made")

    def test_a_missing_feature_keeps_its_goal(self):
        record = self.suite.measure(row(side(0.001), side(0.003), goal=2, missing="not there yet"), 1)
        self.assertEqual((record["ratio"], record["goal"], record["met"], record["note"]), (None, 2, None, "not there yet"))

    def test_pairs_under_foreign_load_are_dropped_and_made_up_for(self):
        loads = iter([0.9, 0.0, 0.9] + [0.0] * 100)
        original, suite.Load.foreign = suite.Load.foreign, lambda _: next(loads)
        try:
            record = self.suite.measure(row(side(0.001), side(0.003)), 1)
        finally:
            suite.Load.foreign = original
        self.assertEqual((record["pairs"], record["dropped"]), (20, 2))

    def test_a_machine_that_is_never_quiet_is_said(self):
        original, suite.Load.foreign = suite.Load.foreign, lambda _: 0.9
        try:
            record = self.suite.measure(row(side(0.001), side(0.003)), 1)
        finally:
            suite.Load.foreign = original
        self.assertIn("busy", record["note"])

    def broken(self, program, patience=5):
        """What a subject that is this program ends as."""
        with self.assertRaises(suite.SubjectError) as raised:
            subject = suite.Subject([sys.executable, "-c", program], None, self.suite.log, patience)
            with subject:
                subject.seconds(1)
        return str(raised.exception)

    def test_a_subject_that_misbehaves_is_an_error_of_its_row(self):
        hello = "print('{\"subject\": 1}', flush=True);"
        self.assertIn("no JSON object", self.broken("print('rubbish')"))
        self.assertIn("no JSON object", self.broken("print([1])"))
        self.assertIn("without subject", self.broken("print('{}')"))
        self.assertIn("ended", self.broken(""))
        self.assertIn("exit code 3", self.broken(hello + "raise SystemExit(3)"))
        self.assertIn("took 0 seconds", self.broken(hello + "input(); print('{\"seconds\": 0}')"))
        self.assertIn("did not answer", self.broken(hello + "import time; time.sleep(60)", patience=0.5))
        with self.assertRaises(suite.SubjectError):
            suite.Subject(["/there/is/no/such/program"], None, self.suite.log)

    def test_a_damaged_result_is_one_sentence(self):
        file = pathlib.Path(self.folder.name) / "result.json"
        for text in ("", "[]", "{}", '{"records": [{}]}', '{"records": [{"name": "a", "ratio": 0, "low": 1, "high": 1}]}', "\0"):
            file.write_text(text)
            with self.assertRaises(SystemExit) as raised:
                suite.read_result(file)
            self.assertIn("is no result", str(raised.exception))

    def test_turns_are_abba(self):
        order = []

        class Noted:
            def __init__(self, name):
                self.name, self.process = name, types.SimpleNamespace(pid=1)

            def seconds(self, count):
                order.append(self.name)
                return 0.01 * count
        record = {}
        one, other = Noted("a"), Noted("b")
        self.suite.warm_up = lambda *_: 0.01
        self.suite.pairs(row(side(1), side(1)), record, one, other)
        self.assertEqual(order[:8], list("abbaabba"))

    def test_foreign_load_sees_a_busy_process(self):
        import subprocess
        load = suite.Load()
        if suite.busy_seconds() is None:
            self.skipTest("no /proc/stat here")
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            import time
            load.begin()
            time.sleep(0.5)
            seen = load.foreign()
            load = suite.Load(busy.pid)
            time.sleep(0.5)
            own = load.foreign()
        finally:
            busy.kill()
            busy.wait()
        self.assertGreater(seen, 0.2)
        self.assertLess(own, seen)


class Table(unittest.TestCase):
    def options(self, *arguments):
        return suite.parse(list(arguments))

    def test_names_are_unique(self):
        names = rows.names(self.options("--threads", "1,2"))
        self.assertEqual(len(names), len(set(names)))

    def test_every_goal_of_missing_hardware_is_a_row(self):
        found = rows.rows(self.options("--threads", "1,2"), {"fp32"}, [])
        missing = [row for row in found if row.missing]
        self.assertTrue(missing)
        self.assertTrue(all(row.goal is not None for row in missing))

    def test_hardware_that_is_not_there_is_left_out_aloud(self):
        left_out = []
        found = rows.rows(self.options("--threads", "1"), {"fp32"}, left_out)
        self.assertFalse(any(row.precision == "bf16" and not row.missing for row in found))
        self.assertTrue(any("bf16" in entry["reason"] for entry in left_out))

    def test_pairs_below_twenty_are_refused(self):
        with self.assertRaises(SystemExit):
            self.options("--pairs", "5")


class Compare(unittest.TestCase):
    def compared(self, change, **result):
        """What comparing a met goal with a changed record returns; None: without that record."""
        record = {"name": "a", "ratio": 2.0, "low": 1.9, "high": 2.1, "met": True}
        with tempfile.TemporaryDirectory() as folder:
            files = [str(pathlib.Path(folder) / name) for name in ("one", "other")]
            pathlib.Path(files[0]).write_text(json.dumps({"schema": 1, "records": [record]}))
            records = [] if change is None else [dict(record, **change)]
            pathlib.Path(files[1]).write_text(json.dumps({"schema": 1, "records": records, **result}))
            return suite.compare_results(*files)

    def test_a_lost_goal_fails(self):
        self.assertEqual(self.compared({}), 0)
        self.assertEqual(self.compared({"ratio": 1.0, "low": 0.9, "high": 1.1, "met": False}), 1)

    def test_a_goal_that_is_no_longer_measured_is_lost(self):
        nothing = {"ratio": None, "low": None, "high": None, "met": None, "note": "it crashed"}
        self.assertEqual(self.compared(nothing), 1)
        self.assertEqual(self.compared(None), 1)
        self.assertEqual(self.compared(None, mode="quick"), 0)
        self.assertEqual(self.compared(None, command="bench --only b"), 0)

    def test_what_is_no_result_is_refused(self):
        for wrong in ({"schema": 2}, {"records": 5}):
            with self.assertRaises(SystemExit):
                self.compared({}, **wrong)
        with self.assertRaises(SystemExit):
            self.compared({"low": None})


class Comparison(unittest.TestCase):
    """Whether two sides did the same work."""
    row = rows.Row("a", "W1", "bf16", {}, {}, **rows.LOW)

    def test_the_same_work_passes(self):
        self.assertIsNone(self.row.problem(0.4, 1.02, [2.0, 1.0], [2.0, 1.01]))
        self.assertIsNone(self.row.problem(0.0, None, [], []))

    def test_fewer_steps_are_noticed(self):
        for moved in (0.5, 0.8, 2.0):
            self.assertIn("times as far", self.row.problem(0.4, moved, [2.0, 1.0], [2.0, 1.0]))

    def test_what_is_no_number_is_wrong(self):
        for weights in (None, math.nan, -0.1, True):
            self.assertIsNotNone(self.row.problem(weights, 1.0, [1.0], [1.0]))
        for loss in (None, math.nan, math.inf):
            self.assertIsNotNone(self.row.problem(0.1, 1.0, [loss], [1.0]))
        self.assertIsNotNone(self.row.problem(0.1, 1.0, [1.0], []))
        self.assertIsNotNone(self.row.problem(0.1, math.nan, [1.0], [1.0]))


class Result(unittest.TestCase):
    def test_an_output_that_cannot_be_written_is_refused_before_the_measuring(self):
        for path in ("/proc/nothing/x.json", tempfile.gettempdir()):
            with self.assertRaises(SystemExit):
                suite.Output(path)

    def test_json_has_no_nan(self):
        self.assertEqual(suite.without_nan({"a": [math.nan, {"b": math.inf}, 1.0]}), {"a": [None, {"b": None}, 1.0]})


if __name__ == "__main__":
    unittest.main()
