#!/usr/bin/env python3
"""Runs the tests that ctest does not, adds ctest's results, and prints one closing line.

A skip is a test that proved nothing, so each is listed with its reason: ctest's own (exit code
77, with a line `SKIP: reason` in the output), single GoogleTest cases inside a binary that passed,
and unittest's.
"""

import sys

# This folder holds a tokenize.py; the standard library's must come first for every import below.
if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))

import argparse
import os
import re
import subprocess
import unittest
from pathlib import Path
from xml.etree import ElementTree

SKIP_CODE = 77
REASON = re.compile(r"^\s*(?:\[[^\]]*\]\s*)?SKIP: (.+)$", re.MULTILINE)
CASE_SKIPPED = re.compile(r"^\[  SKIPPED \] (\S+) \(\d+ ms\)", re.MULTILINE)
CASE_STARTED = re.compile(r"^\[ RUN      \] ")


class Tally:
    """Results of all kinds of tests."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []
        self.skipped: dict[str, str] = {}

    def add_ctest(self, junit: Path) -> None:
        try:
            suite = ElementTree.parse(junit).getroot()
        except (OSError, ElementTree.ParseError) as error:
            self.failed.append(f"ctest: no results ({error})")
            return
        for case in suite.iter("testcase"):
            name, status = case.get("name", "?"), case.get("status", "")
            output = case.findtext("system-out") or ""
            if status == "run":
                self.passed += 1
                self.skipped.update(skipped_cases(name, output))
            elif status == "fail":
                self.failed.append(name)
            else:  # notrun, disabled
                note = case.find("skipped")
                message = "" if note is None else note.get("message", "")
                self.skipped[name] = skip_reason(output) or message or status
                if status == "notrun" and "SKIP_RETURN_CODE" not in message:
                    # Unable to start it is no reason to pass: a missing binary, say.
                    self.failed.append(f"{name} ({self.skipped.pop(name)})")

    def add_python(self, folder: Path) -> None:
        suite = unittest.defaultTestLoader.discover(str(folder), top_level_dir=str(folder))
        result = unittest.TextTestRunner(stream=sys.stdout, verbosity=1).run(suite)
        bad = [test.id() for test, _ in result.failures + result.errors]
        bad += [test.id() for test in result.unexpectedSuccesses]
        self.failed += sorted(set(bad))
        self.skipped.update({test.id(): reason for test, reason in result.skipped})
        # A test with failing subtests has several entries, one that fails to load none that ran.
        whole = {name.split(" (")[0] for name in bad}
        self.passed += max(result.testsRun - len(whole) - len(result.skipped), 0)

    def add_script(self, script: Path) -> None:
        done = subprocess.run(
            [str(script.resolve())], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )
        print(done.stdout, end="")
        if done.returncode == SKIP_CODE:
            self.skipped[str(script)] = skip_reason(done.stdout) or "no reason given"
        elif done.returncode:
            self.failed.append(f"{script} (exit code {done.returncode})")
        else:
            self.passed += 1

    def closing_line(self) -> str:
        return f"{self.passed} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"

    def exit_code(self) -> int:
        return 1 if self.failed or not self.passed else 0


def skip_reason(output: str) -> str:
    """The reasons a test printed, once each: every rank may print its own."""
    return "; ".join(dict.fromkeys(reason.strip() for reason in REASON.findall(output)))


def skipped_cases(test: str, output: str) -> dict[str, str]:
    """GoogleTest cases that skipped themselves, with what they streamed into GTEST_SKIP()."""
    found: dict[str, str] = {}
    lines = output.splitlines()
    started = 0
    for number, line in enumerate(lines):
        if CASE_STARTED.match(line):
            started = number
        elif match := CASE_SKIPPED.match(line):
            said = [x.strip() for x in lines[started + 1 : number]]
            said = [x for x in said if x and not re.search(r":\d+: Skipped$", x)]
            reason = " ".join(said).removeprefix("SKIP: ")
            found[f"{test}: {match[1]}"] = reason or "no reason given"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--junit", type=Path, required=True, help="what ctest --output-junit wrote")
    parser.add_argument("--python", type=Path, required=True, help="folder of unittest tests")
    parser.add_argument("--parity", type=Path, help="script that exits with 77 to skip")
    arguments = parser.parse_args()
    tally = Tally()
    tally.add_ctest(arguments.junit)
    print("\nPython tests", flush=True)
    tally.add_python(arguments.python)
    if arguments.parity and os.access(arguments.parity, os.X_OK):
        print("\nParity checks", flush=True)
        tally.add_script(arguments.parity)
    for name, reason in tally.skipped.items():
        print(f"skipped: {name}: {reason}")
    for name in tally.failed:
        print(f"FAILED: {name}")
    print(tally.closing_line(), flush=True)
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
