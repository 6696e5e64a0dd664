"""Loss curve, test report and quickstart report: what they read and how they fail."""

import json
import tempfile
import unittest
from pathlib import Path

import support  # first: it sets the import path

from PIL import Image
from quickstart_report import is_taught_form, side_by_side
from test_report import Tally, skip_reason

JUNIT = """<?xml version="1.0" encoding="UTF-8"?>
<testsuite name="x" tests="5">
<testcase name="good" status="run"><system-out>[ RUN      ] Mesh.Two
/a/mesh_test.cpp:12: Skipped
needs two GPUs

[  SKIPPED ] Mesh.Two (0 ms)
[  SKIPPED ] Mesh.Two
</system-out></testcase>
<testcase name="bad" status="fail"><failure message=""/><system-out>no</system-out></testcase>
<testcase name="skip" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/>
<system-out>SKIP: no GPU
SKIP: no GPU
</system-out></testcase>
<testcase name="gone" status="notrun"><skipped message="Unable to find executable"/></testcase>
</testsuite>
"""


class TestReport(unittest.TestCase):
    def test_counts_and_reasons(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            junit = Path(name, "ctest.xml")
            junit.write_text(JUNIT)
            tally = Tally()
            tally.add_ctest(junit)
        self.assertEqual(tally.closing_line(), "1 passed, 2 failed, 2 skipped")
        self.assertEqual(tally.skipped, {"good: Mesh.Two": "needs two GPUs", "skip": "no GPU"})
        self.assertEqual(tally.failed, ["bad", "gone (Unable to find executable)"])
        self.assertEqual(tally.exit_code(), 1)

    def test_no_results_is_a_failure(self) -> None:
        tally = Tally()
        self.assertEqual(tally.exit_code(), 1, "nothing ran")
        tally.add_ctest(Path("/nonexistent/ctest.xml"))
        self.assertEqual(len(tally.failed), 1)

    def test_reason_behind_a_rank_tag(self) -> None:
        self.assertEqual(skip_reason("x\n[1,0] SKIP: one GPU\nSKIP: one GPU\n"), "one GPU")


class Plot(unittest.TestCase):
    def run_on(self, text: str) -> tuple[object, Path]:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        metrics, output = Path(holder.name, "metrics.jsonl"), Path(holder.name, "loss.png")
        metrics.write_text(text)
        return support.run_tool("plot_metrics.py", metrics, "-o", output), output

    def test_draws_a_run_that_is_still_going(self) -> None:
        lines = [json.dumps({"step": 0, "eval_loss": 3.0})]
        lines += [json.dumps({"step": s, "loss": 3.0 / s, "memory": {}}) for s in range(1, 9)]
        done, output = self.run_on("\n".join(lines) + '\n{"step": 9, "lo')
        self.assertEqual(done.returncode, 0, done.stderr)
        with Image.open(output) as image:
            self.assertEqual(image.size, (960, 540))
            self.assertGreater(len(image.getcolors(1 << 20)), 10, "more than a blank page")

    def test_one_point_and_odd_values(self) -> None:
        done, output = self.run_on('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": NaN}\n')
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(output.is_file())

    def test_bad_files(self) -> None:
        for text in ("", '{"step": 1}\n', '{"loss": 1}\n{"step": 1, "loss": 1}\n', "x\ny\n"):
            with self.subTest(text):
                done, output = self.run_on(text)
                self.assertEqual(done.returncode, 2)
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
                self.assertFalse(output.exists())


class Quickstart(unittest.TestCase):
    def test_columns(self) -> None:
        rows = side_by_side("word " * 20, "")
        self.assertGreater(len(rows), 1)
        self.assertTrue(rows[0].endswith("| (nothing)"))
        self.assertEqual({row.index("|") for row in rows}, {rows[0].index("|")})

    def test_taught_form(self) -> None:
        self.assertTrue(is_taught_form('{"topic": "a", "answer": "b", "confidence": "low"}'))
        for text in ("Paris", '{"answer": "b"}', '["topic", "answer", "confidence"]'):
            self.assertFalse(is_taught_form(text))


if __name__ == "__main__":
    unittest.main()
