#!/usr/bin/env python3
"""Text to token ids and back, with a model directory's own tokenizer and chat template.

The program works on ids alone; `rowshard generate --prompt` and launch/quickstart come here.
"""

import sys

# This file's name is also the standard library's; that one must win for every import below.
if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))

import argparse
from pathlib import Path

from chat_format import FormatError, ModelTokenizer


def parse_ids(text: str, vocab_size: int) -> list[int]:
    ids: list[int] = []
    for part in text.split(",") if text.strip() else []:
        if not part.strip().isdecimal() or int(part) >= vocab_size:
            raise FormatError(f"--ids: {part.strip()!r} is no token id below {vocab_size}")
        ids.append(int(part))
    return ids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    encode = commands.add_parser("encode", help="print the ids of a text as 1,2,3")
    encode.add_argument("--model", type=Path, required=True)
    encode.add_argument(
        "--chat", action="store_true", help="the text is a user's turn; the answer follows"
    )
    encode.add_argument("--system", help="system prompt, with --chat")
    encode.add_argument("text", metavar="TEXT")
    decode = commands.add_parser("decode", help="print the text of ids")
    decode.add_argument("--model", type=Path, required=True)
    decode.add_argument("--ids", required=True, help="comma-separated, e.g. 1,2,3")
    decode.add_argument("--keep-special", action="store_true", help="print special tokens too")
    arguments = parser.parse_args()
    try:
        tokenizer = ModelTokenizer(arguments.model)
        if arguments.command == "decode":
            ids = parse_ids(arguments.ids, tokenizer.vocab_size)
            print(tokenizer.decode(ids, arguments.keep_special))
            return 0
        if arguments.system and not arguments.chat:
            raise FormatError("--system needs --chat")
        if arguments.chat:
            system = [{"role": "system", "content": arguments.system}] if arguments.system else []
            messages = [*system, {"role": "user", "content": arguments.text}]
            ids = tokenizer.encode_chat_prompt(messages)
        else:
            ids = tokenizer.encode_plain(arguments.text)
        if not ids:
            raise FormatError("the text has no tokens")
    except (FormatError, OSError) as error:
        print(f"tokenize: error: {error}", file=sys.stderr)
        return 2
    print(",".join(map(str, ids)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
