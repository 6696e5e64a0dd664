#!/usr/bin/env python3
"""Turns JSONL training data into the token file that `rowshard finetune --data` reads.

Chats are rendered with the model's own template and only the assistant's turns are trained;
docs/data.md describes the forms read and the file written. Either the whole file is written or
none: the first bad line stops the run with its place and exit code 2.
"""

import sys

# This folder holds a tokenize.py; the standard library's must come first for every import below.
if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))

import argparse
import os
import tempfile
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy

from chat_format import FormatError, ModelTokenizer, Tokens
from records import LineError, Options, read_file


class Limits(NamedTuple):
    """What to do with samples longer than `length` tokens: drop, truncate or error."""

    length: int | None
    overlong: str


class TokenFile:
    """Samples collected for one output file."""

    def __init__(self) -> None:
        self.ids = array("i")
        self.labels = array("i")
        self.offsets = array("q", [0])
        self.trainable = 0
        self.untrainable = 0
        self.overlong = 0

    @property
    def samples(self) -> int:
        return len(self.offsets) - 1

    def add(self, tokens: Tokens, limits: Limits) -> None:
        length = limits.length
        if length is not None and len(tokens.ids) > length:
            if limits.overlong == "error":
                raise FormatError(
                    f"{len(tokens.ids)} tokens, more than {length}; raise --max-length, or pass "
                    "--overlong drop or --overlong truncate"
                )
            self.overlong += 1
            if limits.overlong == "drop":
                return
            tokens = Tokens(tokens.ids[:length], tokens.labels[:length])
        if not (trainable := tokens.trainable()):
            self.untrainable += 1
            return
        self.trainable += trainable
        self.ids.extend(tokens.ids)
        self.labels.extend(tokens.labels)
        self.offsets.append(len(self.ids))

    def write(self, output: Path, metadata: dict[str, str]) -> None:
        """Writes next to the output and renames, so that a reader never sees half a file."""
        tensors = {
            "input_ids": np.frombuffer(self.ids, dtype=np.int32),
            "labels": np.frombuffer(self.labels, dtype=np.int32),
            "sample_offsets": np.frombuffer(self.offsets, dtype=np.int64),
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{output.name}.", dir=output.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(safetensors.numpy.save(tensors, metadata))
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, output)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def prepare(
    tokenizer: ModelTokenizer, sources: list[Path], output: Path, limits: Limits, options: Options
) -> TokenFile:
    """Reads every source and writes `output`; raises FormatError or LineError before writing."""
    if limits.length is None:
        limits = limits._replace(length=tokenizer.max_length)
    collected = TokenFile()
    for source in sources:
        for line, tokens in read_file(source, tokenizer, options):
            try:
                if tokens.ids and max(tokens.ids) >= tokenizer.vocab_size:
                    raise FormatError(
                        f"token {max(tokens.ids)} is outside the model's {tokenizer.vocab_size}"
                    )
                collected.add(tokens, limits)
            except FormatError as error:
                raise LineError(source, line, str(error)) from error
    names = ", ".join(map(str, sources))
    if not collected.samples:
        raise FormatError(
            f"{names}: no sample with a trainable token ({collected.untrainable} without one, "
            f"{collected.overlong} too long)"
        )
    metadata = {
        "format": "rowshard.tokens",
        "version": "1",
        "vocab_size": str(tokenizer.vocab_size),
        "samples": str(collected.samples),
        "trainable_tokens": str(collected.trainable),
        "dropped": str(collected.untrainable + collected.overlong * (limits.overlong == "drop")),
        "tokenizer": tokenizer.fingerprint,
        "source": ", ".join(source.name for source in sources),
    }
    collected.write(output, metadata)
    return collected


def summary(collected: TokenFile, limits: Limits) -> str:
    """One line: what is in the file and what is not."""
    tokens = len(collected.ids)
    parts = [
        f"{collected.samples} samples, {tokens} tokens, {collected.trainable} of them trainable"
    ]
    if collected.untrainable:
        parts.append(f"{collected.untrainable} dropped without a trainable token")
    if collected.overlong:
        verb = "dropped as" if limits.overlong == "drop" else "truncated, being"
        parts.append(f"{collected.overlong} {verb} too long")
    return "; ".join(parts)


def main(command_line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model directory")
    parser.add_argument("--data", type=Path, required=True, nargs="+", help="JSONL files")
    parser.add_argument("--output", type=Path, required=True, help="token file to write")
    parser.add_argument(
        "--max-length", type=int, help="longest sample in tokens (default: the model's context)"
    )
    parser.add_argument(
        "--overlong",
        choices=("error", "drop", "truncate"),
        default="error",
        help="what to do with longer samples (default: error)",
    )
    parser.add_argument(
        "--train-turns",
        choices=("all", "last"),
        default="all",
        help="which of the assistant's turns are trained (default: all)",
    )
    parser.add_argument(
        "--append-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end text and prompt/completion samples with the end-of-sequence token",
    )
    arguments = parser.parse_args(command_line)
    limits = Limits(arguments.max_length, arguments.overlong)
    options = Options(arguments.train_turns, arguments.append_eos)
    try:
        if limits.length is not None and limits.length < 2:
            raise FormatError("--max-length must be at least 2")
        for source in arguments.data:
            if not source.is_file():
                raise FormatError(f"{source}: no such file")
        tokenizer = ModelTokenizer(arguments.model)
        collected = prepare(tokenizer, arguments.data, arguments.output, limits, options)
    except (FormatError, LineError, OSError) as error:
        print(f"prepare_data: error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.output}: {summary(collected, limits)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
