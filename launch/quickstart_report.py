#!/usr/bin/env python3
"""Shows what a fine-tuning run changed: answers before and after, held-out loss, bytes, places.

The base and the tuned model get the same prompts, none of which was trained on, and answer
greedily, so that two readers see the same text.
"""

import sys

# This folder holds a tokenize.py; the standard library's must come first for every import below.
if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))

import argparse
import json
import subprocess
import textwrap
from pathlib import Path
from typing import Any

from chat_format import FormatError, ModelTokenizer

COLUMN = 46


class ReportError(Exception):
    """The report cannot be made; the message says why."""


def generate(command: list[str], ids: list[int], count: int) -> list[int]:
    """Greedy continuation by `rowshard generate`, which prints a line `ids: 1,2,3`."""
    prompt = ",".join(map(str, ids))
    arguments = [*command, "--prompt-ids", prompt, "--max-new-tokens", str(count)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        message = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise ReportError(f"rowshard generate failed with {done.returncode}: {message}")
    for line in done.stdout.splitlines():
        if line.startswith("ids:"):
            return [int(part) for part in line[4:].split(",") if part.strip()]
    raise ReportError("rowshard generate printed no line 'ids: ...'")


def side_by_side(left: str, right: str) -> list[str]:
    """Two texts as two wrapped columns."""

    def wrap(text: str) -> list[str]:
        return [row for line in text.splitlines() for row in textwrap.wrap(line, COLUMN) or [""]]

    a, b = wrap(left) or ["(nothing)"], wrap(right) or ["(nothing)"]
    rows = max(len(a), len(b))
    a, b = a + [""] * (rows - len(a)), b + [""] * (rows - len(b))
    return [f"  {x:<{COLUMN}} | {y}".rstrip() for x, y in zip(a, b)]


def is_taught_form(answer: str) -> bool:
    """One JSON object with the three keys the training set has."""
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return isinstance(value, dict) and list(value) == ["topic", "answer", "confidence"]


def show_answers(arguments: argparse.Namespace, adapter: Path) -> None:
    tokenizer = ModelTokenizer(arguments.model)
    prompts = [p for p in arguments.prompts.read_text(encoding="utf-8").splitlines() if p.strip()]
    base = [arguments.program, "generate", "--model", str(arguments.model)]
    right = {"before": 0, "after": 0}
    print(f"\nThe same held-out questions, greedy answers\n  {'before':<{COLUMN}} | after")
    for prompt in prompts:
        ids = tokenizer.encode_chat_prompt([{"role": "user", "content": prompt}])
        answers = []
        for side, extra in (("before", []), ("after", ["--adapter", str(adapter)])):
            text = tokenizer.decode(generate(base + extra, ids, arguments.max_new_tokens)).strip()
            right[side] += is_taught_form(text)
            answers.append(text)
        print(f"\n  > {prompt}")
        print("\n".join(side_by_side(*answers)), flush=True)
    print(
        f"\nIn the taught form: {right['before']} of {len(prompts)} before, "
        f"{right['after']} of {len(prompts)} after"
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def show_metrics(lines: list[dict[str, Any]]) -> None:
    evaluations = [line for line in lines if line.get("eval_loss") is not None]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        fall = 100 * (1 - last["eval_loss"] / first["eval_loss"])
        print(
            f"Held-out loss: {first['eval_loss']:.4f} at step {first['step']}, "
            f"{last['eval_loss']:.4f} at step {last['step']} ({fall:.0f} % lower)"
        )
    memory = next((line["memory"] for line in reversed(lines) if line.get("memory")), None)
    if memory:
        print("Bytes a rank, by category:")
        for name, value in memory.items():
            print(f"  {name:<16} {value:>14,}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", required=True, help="the rowshard program")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="output directory of the run")
    parser.add_argument("--prompts", type=Path, required=True, help="one question a line")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    arguments = parser.parse_args()
    adapter = arguments.run / "adapter"
    try:
        if not (adapter / "adapter_config.json").is_file():
            raise ReportError(f"{adapter}: no adapter")
        show_answers(arguments, adapter)
        show_metrics(read_lines(arguments.run / "metrics.jsonl"))
    except (ReportError, FormatError, OSError, ValueError) as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 2
    print(f"Adapter (PEFT directory): {adapter}")
    print(f"Metrics:                  {arguments.run / 'metrics.jsonl'}")
    if (arguments.run / "loss.png").is_file():
        print(f"Loss curve:               {arguments.run / 'loss.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
