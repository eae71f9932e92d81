#!/usr/bin/env python3
"""Tests of report.py: `python3 benchmarks/test_report.py`. Those of pictures are skipped without matplotlib."""

import html.parser
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import report  # noqa: E402

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
STRANGE = "<b>&\"'|`*_$x^{2$ ü 試 \u0000 \ud800 <!-- benchmarks: end --> </script> #010104"
README = "# Title\n\n<!-- benchmarks: begin, written by a program -->\nold\n<!-- benchmarks: end -->\n\nThe rest.\n"


def record(name, ratio=2.0, **more):
    chapter, precision, workload = (name.split("/") + ["bf16", "W1"])[:3]
    low, high = (None, None) if ratio is None else (ratio * 0.9, ratio * 1.1)
    return {"name": name, "workload": workload, "precision": precision, "threads": 2, "ours": 0.5e-3, "baseline": 1e-3,
            "unit": "s/step", "ratio": ratio, "low": low, "high": high, "ceiling_fraction": 0.4, "goal": 1.5, "met": True,
            "ours_is": "ours is this", "baseline_is": "the baseline is that", "pairs": 20, "dropped": 1,
            "weights_difference": 1.25e-6, "loss": 0.51234, "baseline_loss": 0.5, "tolerance": "equal to a part in 1000",
            "note": None, "rerun": f"bash cmake/dev.sh bench --only '^{name}$'", **more}


def made_up():
    return {
        "schema": 1, "mode": "quick", "command": "bash cmake/dev.sh bench --only 'a|b'", "started": "2026-11-30T23:00:00Z",
        "minutes": 4.2,
        "machine": {"processor": "Some CPU @ 2 GHz", "cores": 2, "flags": ["avx2", "amx_bf16"], "memory_bytes": 2**33,
                    "gpu": None, "kernel": "6.1", "governor": None, "load": "no foreign load seen"},
        "versions": {"frugal": "0.9", "torch": "2.13.0", "accelerate": None},
        "ceilings": [{"name": "matmul/fp32", "threads": 2, "value": 1.1e11, "unit": "FLOP/s"},
                     {"name": "matmul/bf16", "threads": 2, "value": 3.1e11, "unit": "FLOP/s"},
                     {"name": "memory/triad", "threads": 2, "value": 2.1e10, "unit": "byte/s"},
                     {"name": "disk/write", "threads": None, "value": None, "unit": "byte/s"}],
        "records": [record("peer/fp32/W1/eager", 1.01, goal=1.05, met=False, note="nearly"),
                    record("precision/bf16/W2", 2.1, goal=2.0),
                    record("precision/bf16/" + STRANGE, 0.7, goal=None, met=None, note=STRANGE, rerun=STRANGE, ours_is=STRANGE),
                    record("precision/fp16/W4", None, met=None, ceiling_fraction=None, weights_difference=None,
                           note="needs a GPU"),
                    record("checkpoint/fp32/W5", 400.0, goal=10, unit="s"),
                    record("lever/fp32/W1", 1.2, goal=None, met=None, low=None),
                    record("unheard/fp32/W1"), {"name": None}, {}],
        "speeds": [{"workload": "W2", "loop": "frugal", "precision": "bf16", "threads": 2, "steps_per_second": 123.4,
                    "samples_per_second": 31590.4, "peak_bytes": 2**20, "loss": 0.5, "fp32_loss": None}],
        "counts": [{"name": "W1/frugal/bf16", "allocations": 12, "operators": 1234567, "casts": 0, "reads": None,
                    "instructions": None}],
        "curves": [{"group": STRANGE, "label": "fp32, seed 0", "precision": "fp32", "seconds": [1, 2, None, 4],
                    "loss": [2.0, 1.0, 0.9, None]},
                   {"group": "two", "label": STRANGE, "precision": STRANGE, "seconds": [1], "loss": [2.0]},
                   {"group": "empty", "label": "none", "precision": "bf16", "seconds": None, "loss": []}],
        "memory": [{"workload": "W2", "precision": "bf16", "batch": b, "peak_bytes": b * 2**18} for b in (256, 64, 128)]
        + [{"workload": "W2", "precision": "fp32", "batch": None, "peak_bytes": None}],
        "micro": [{"name": "one", "ns": 12.5, "threads": 1}, {"name": STRANGE, "ns": None}],
        "left_out": [{"name": "precision/tf32/*", "reason": "needs a CUDA GPU"}],
    }


class Page(html.parser.HTMLParser):
    """Balanced tags, rows of equal length under a caption, no foreign address, every svg with words."""

    void = {"meta", "br", "link", "img", "wbr"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.pictures, self.text, self.ids = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag not in self.void:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "svg":
            self.pictures.append(attributes)
        for name in ("src", "href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#"), attributes

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data


class Html(unittest.TestCase):
    def page(self, data, pictures=None):
        return report.html_page(report.Result(data), pictures)

    def test_it_begins_with_the_machine_the_ceilings_and_what_was_met(self):
        text = self.page(made_up())
        places = [text.index(words) for words in (
            "Some CPU @ 2 GHz, 2 cores, 8.00 GiB of memory, no GPU, with avx2 and amx_bf16, kernel 6.1", "frugal 0.9 and torch 2.13.0",
            ">310 GFLOP/s<", "3 of 4 goals met, 2 rows without a goal, 3 rows could not be measured.", ">Precision: every row<")]
        self.assertEqual(places, sorted(places))
        self.assertNotIn("None", text)

    def test_every_table_has_a_caption_heads_and_rows_of_one_length(self):
        text = self.page(made_up())
        page = Page(text)
        self.assertEqual(len(page.tables), text.count("<caption>"))
        self.assertEqual(text.count('<th scope="col"'), sum(len(table[0]) for table in page.tables))
        for table in page.tables:
            self.assertEqual({len(row) for row in table}, {len(table[0])}, table)
        self.assertEqual(len(page.ids), len(set(page.ids)))

    def test_a_row_has_all_that_was_measured(self):
        rows = [row for table in Page(self.page(made_up())).tables for row in table]
        row = next(row for row in rows if row[0] == "bf16/W2" and len(row) == 9)
        self.assertEqual(row, ["bf16/W2", "2.10 [1.89, 2.31] 20 pairs, 1 dropped", "2.00", "✓ met", "500 µs/step ours is this",
                               "1.00 ms/step the baseline is that", "40 %", "0.5123 / 0.5000 weights differ by 1.3e-06; equal to a part in 1000",
                               "bash cmake/dev.sh bench --only '^precision/bf16/W2$'"])
        row = next(row for row in rows if row[0].startswith("fp16/W4"))
        self.assertEqual([row[0], row[1][:12], row[3]], ["fp16/W4 needs a GPU", "not measured", "not measured"])
        unmet = next(row for row in rows if row[0] == "peer/fp32/W1/eager")
        self.assertEqual(unmet[1:], ["1.01 [0.909, 1.11]", "1.05", "nearly"])

    def test_chapters_come_in_their_order_and_unknown_ones_last(self):
        titles = re.findall(r"<h2[^>]*>([^<]*)<", self.page(made_up()))
        self.assertEqual(titles, ["Ceilings", "What was met", "Precision", "Levers", "Peers", "Checkpoints", "unheard", "(no name)",
                                  "Speeds", "Loss over time", "Memory", "Counts", "Single operations", "Left out"])

    def test_strange_characters_are_shown_and_do_nothing(self):
        text = self.page(made_up())
        self.assertNotIn("<b>", text)
        self.assertNotIn("</script>", text)
        self.assertNotIn("<!--", text)
        text.encode("utf-8")
        shown = "".join(Page(text).text)
        self.assertIn("<b>&\"'|`*_$x^{2$ ü 試   \ufffd <!-- benchmarks: end --> </script>", shown)

    def test_without_pictures_it_says_so(self):
        self.assertIn("bash cmake/dev.sh bench-peers", self.page(made_up()))
        self.assertIn("matplotlib", self.page(made_up()))

    def test_an_empty_result_is_a_page(self):
        for data in ({"schema": 1}, {"schema": 1, **{key: None for key in made_up() if key != "schema"}}):
            text = self.page(data)
            Page(text)
            self.assertIn("No goal was set", text)
            report.markdown_page(report.Result(data))
            report.readme_block(report.Result(data))

    def test_records_of_nothing_but_a_name_and_wrong_types(self):
        odd = {"name": "peer/odd", "ratio": "fast", "low": [], "goal": {}, "met": "yes", "ours": True, "loss": float("nan"),
               "threads": "two", "unit": 3}
        text = self.page({"schema": 1, "records": [{"name": "peer/bare"}, odd, "no record"], "ceilings": [None]})
        Page(text)
        self.assertIn("2 rows could not be measured", text)


@unittest.skipUnless(HAS_MATPLOTLIB, "not installed: matplotlib")
class Pictures(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.pictures = report.Pictures()
        cls.result = report.Result(made_up())
        cls.page = report.html_page(cls.result, cls.pictures)

    def test_the_page_has_each_picture_with_words(self):
        page = Page(self.page)
        words = [picture["aria-label"] for picture in page.pictures]
        self.assertEqual([w.split(".")[0].split(" in ")[0] for w in words],
                         ["Bars of the ratios"] * 5 + ["Roofline", "Loss over time", "Peak memory against batch size"])
        self.assertIn("bf16/W2 2.10 [1.89, 2.31], met; ", words[0])
        self.assertIn("W1/eager 1.01 [0.909, 1.11], not met.", words[2])
        self.assertIn("W2 in bf16 124 GFLOP/s (40 %)", words[5])
        self.assertIn("W2 in bf16, batch 64: 16.0 MiB; W2 in bf16, batch 128: 32.0 MiB", words[-1])
        self.assertNotIn("bench-peers", self.page)
        self.assertEqual(len(page.ids), len(set(page.ids)))
        self.assertEqual({picture["role"] for picture in page.pictures}, {"img"})

    def test_met_and_unmet_differ_in_colour_and_shape(self):
        met, unmet = (self.pictures.speed_up(self.result, chapter).svg for chapter in ("unheard", "peer"))
        self.assertIn("var(--met)", met)
        self.assertNotIn("var(--unmet)", met)
        self.assertIn("var(--unmet)", unmet)
        self.assertIn("✓</text>", met)
        self.assertIn("✗</text>", unmet)
        self.assertIn("stroke-dasharray: 3.7", unmet)

    def test_svg_is_well_formed_and_in_colours_of_the_page(self):
        for svg in re.findall(r"<svg.*?</svg>", self.page, re.DOTALL):
            xml.etree.ElementTree.fromstring(svg)
            self.assertIsNone(re.search(r"(fill|stroke): #0101", svg))
            self.assertNotIn("<metadata", svg)

    def test_chapters_without_a_ratio_have_no_picture(self):
        result = report.Result({"schema": 1, "records": [record("peer/none", None)]})
        self.assertIsNone(self.pictures.speed_up(result, "peer"))
        for name in ("roofline", "curves", "memory"):
            self.assertIsNone(getattr(self.pictures, name)(result))

    def test_a_roofline_needs_no_memory_and_no_workloads(self):
        result = report.Result({"schema": 1, "ceilings": [{"name": "matmul/bf16", "threads": None, "value": 1e12, "unit": "FLOP/s"}]})
        self.assertIn("no workload was placed", self.pictures.roofline(result).words)

    def test_the_same_input_gives_the_same_page(self):
        self.assertEqual(report.html_page(self.result, report.Pictures()), self.page)


class Markdown(unittest.TestCase):
    def test_tables_keep_their_columns(self):
        text = report.markdown_page(report.Result(made_up()))
        columns = 0
        for line in text.splitlines():
            if line.startswith("|"):
                cells = len(re.findall(r"(?<!\\)\|", line)) - 1
                columns = columns or cells
                self.assertEqual(cells, columns, line)
            else:
                columns = 0
        self.assertIn("Measured by `bash cmake/dev.sh bench --only 'a\\|b'`.", text)

    def test_text_is_shown_as_it_is(self):
        self.assertEqual(report.markdown("amx_bf16 [1, 2] 5 %"), "amx_bf16 [1, 2] 5 %")
        self.assertEqual(report.markdown("_a_ [b](c) *d* |e| <!--"), "\\_a\\_ [b\\](c) \\*d\\* \\|e\\| &lt;!--")

    def test_code_with_backticks_stays_code(self):
        self.assertEqual(report.markdown_code("a `b` ``c"), "``` a `b` ``c ```")


class Numbers(unittest.TestCase):
    def test_units(self):
        self.assertEqual([report.duration(v, "s/step") for v in (0, 1.5e-9, 2e-3, 75, None)],
                         ["0 ns/step", "1.50 ns/step", "2.00 ms/step", "75.0 s/step", "–"])
        self.assertEqual([report.rate(3.1e11, "FLOP/s"), report.rate(2.1e10, "byte/s"), report.size(1536)],
                         ["310 GFLOP/s", "21.0 GB/s", "1.50 KiB"])
        self.assertEqual([report.digits(v) for v in (1234.5, 0.00012, 1e7, 1.0, float("inf"), True)],
                         ["1,234", "1.20e-04", "1.00e+07", "1.00", "–", "–"])

    def test_one_of_a_kind_is_singular(self):
        self.assertEqual([report.counted(1, "core"), report.counted(2, "core")], ["1 core", "2 cores"])


class Command(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.result = self.folder / "quick.json"
        self.result.write_text(json.dumps(made_up()))
        self.readme = self.folder / "README.md"
        self.readme.write_text(README)

    def run_report(self, *options, **environment):
        return subprocess.run([sys.executable, HERE / "report.py", self.result, *options], text=True, capture_output=True,
                              env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment})

    def test_pages_lie_beside_the_result_or_in_the_folder(self):
        self.assertEqual(self.run_report().stderr, "")
        done = self.run_report("--out", self.folder / "new/one")
        self.assertEqual(done.stdout.split(), [str(self.folder / "new/one/quick.html"), str(self.folder / "new/one/quick.md")])
        for name in ("quick.html", "quick.md"):
            self.assertEqual((self.folder / name).read_bytes(), (self.folder / "new/one" / name).read_bytes())
        self.assertEqual(self.readme.read_text(), README)

    def test_a_matplotlib_that_fails_leaves_the_tables(self):
        (self.folder / "matplotlib.py").write_text("raise RuntimeError('does not fit this numpy')\n")
        self.assertEqual(self.run_report(PYTHONPATH=str(self.folder)).returncode, 0)
        text = (self.folder / "quick.html").read_text(encoding="utf-8")
        self.assertIn("bench-peers", text)
        self.assertIn("every row", text)
        self.assertNotIn("<svg", text)

    def test_the_readme_gets_its_rows_and_keeps_the_rest(self):
        for _ in range(2):  # writing again changes nothing more
            self.assertEqual(self.run_report("--readme", self.readme).returncode, 0)
            text = self.readme.read_text(encoding="utf-8")
            self.assertTrue(text.startswith("# Title\n\n<!-- benchmarks: begin, written by a program -->\n`bash cmake/dev.sh bench"))
            self.assertTrue(text.endswith("\n<!-- benchmarks: end -->\n\nThe rest.\n"))
            self.assertEqual(text.count("<!-- benchmarks: end -->"), 1)
            self.assertNotIn("\nold\n", text)
            rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
            self.assertEqual([row[:17] for row in rows], ["| row", "| precision/bf16/", "| peer/fp32/W1/ea",
                                                          "| checkpoint/fp32"])   # the other one has no goal
            self.assertIn("| precision/bf16/W2 | 2.10 [1.89, 2.31] | 2.00 | ✓ met |", text)
            self.assertIn("1 row of these chapters could not be measured", text)
            self.assertIn("Some CPU @ 2 GHz", text)

    def test_a_readme_without_marks_is_left_alone(self):
        for text in ("no marks", "<!-- benchmarks: end --> <!-- benchmarks: begin -->"):
            self.readme.write_text(text)
            done = self.run_report("--readme", self.readme)
            self.assertIn("README.md: there is no `<!-- benchmarks: begin", done.stderr)
            self.assertEqual((done.returncode, self.readme.read_text()), (1, text))
        self.assertFalse((self.folder / "quick.html").exists())

    def test_what_is_no_result_is_refused(self):
        for text in ('{"schema": 2}', "[]", "{", ""):
            self.result.write_text(text)
            done = self.run_report()
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (1, 1), text)


if __name__ == "__main__":
    unittest.main(verbosity=2)
