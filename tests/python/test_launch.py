"""The launch scripts refuse bad input in one line, with exit code 2, before doing anything."""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import support


class BadInput(unittest.TestCase):
    def setUp(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)
        self.output = self.folder / "out"

    def refused(self, reason: str, *command: object, **environment: str) -> None:
        script, *arguments = map(str, command)
        done = subprocess.run(
            [str(support.ROOT / "launch" / script), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **environment},
        )
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertIn(reason, done.stderr)
        self.assertFalse(self.output.exists())

    def test_unknown_options(self) -> None:
        for script in ("setup", "quickstart"):
            self.refused("unknown option", script, "--nonsense")
        self.refused("unknown preset", "build", "fastest")

    def test_quickstart_values(self) -> None:
        for option, value in (("--steps", "0"), ("--ranks", "two"), ("--device", "tpu")):
            self.refused(option, "quickstart", "--output-dir", self.output, option, value)
        self.refused("needs a value", "quickstart", "--output-dir")

    def test_finetune_values(self) -> None:
        data = support.write_lines(self.folder / "d.jsonl", {"text": "x"})
        good = ("--model", self.folder, "--data", data, "--output-dir", self.output)
        self.refused("--model is missing", "finetune", "--data", data)
        self.refused("no such model", "finetune", *good, "--model", self.folder / "absent")
        self.refused("no such file", "finetune", *good, "--eval-data", self.folder / "absent")
        self.refused("no positive number", "finetune", *good, "--tp=0")
        self.refused("starts the ranks itself", "finetune", *good, RANK="0")
        self.refused("starts the ranks itself", "finetune", *good, "--", "--lora-r", "4", RANK="0")

    def test_finetune_hands_options_on(self) -> None:
        program = support.ROOT / "build/release/rowshard"
        if not program.exists():
            self.skipTest(f"{program} is not built")
        model = support.ROOT / "tests/parity/golden/llama_fp8"
        for separator in ([], ["--"]):
            done = subprocess.run(
                [support.ROOT / "launch/finetune", "--model", model, "--data"]
                + [model / "tokens.safetensors", "--output-dir", self.output, "--device", "host"]
                + ["--ranks", "1", *separator, "--lora-r", "4", "--seq-len", "64", "--dry-run"],
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("dry run: everything loads", done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
