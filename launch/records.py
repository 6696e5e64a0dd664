"""Reads the JSONL forms people keep training data in, as one kind of record.

Six forms are told apart by their keys: {"messages"}, {"conversations"} (ShareGPT),
{"instruction", "input", "output"} (Alpaca), {"prompt", "completion"}, {"text"}, and
{"input_ids", "labels"}, which is already tokenised.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from chat_format import MASKED, FormatError, Message, ModelTokenizer, Tokens

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


class Options(NamedTuple):
    """What the caller may choose about the reading of a line."""

    turns: str = "all"  # which assistant turns are trained: all, last
    append_eos: bool = True  # for text and prompt/completion lines


class LineError(Exception):
    """A bad line, with its place."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}:{line}: {reason}")


def content_text(value: Any) -> str:
    """A turn's content: a string, or a list of text parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in value
    ):
        return "".join(part["text"] for part in value)
    raise FormatError("a message's content must be text")


def read_messages(value: Any, role_key: str, content_key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise FormatError("the list of messages is empty or no list")
    messages: list[Message] = []
    for item in value:
        if not isinstance(item, dict) or role_key not in item or content_key not in item:
            raise FormatError(f"a message needs {role_key!r} and {content_key!r}")
        role = item[role_key]
        if not isinstance(role, str) or not role:
            raise FormatError(f"a message's {role_key!r} must be a role's name")
        if role_key == "from":
            if role not in SHAREGPT_ROLES:
                raise FormatError(f"unknown role {role!r} (known: {', '.join(SHAREGPT_ROLES)})")
            role = SHAREGPT_ROLES[role]
        message = {"role": role, "content": content_text(item[content_key])}
        for flag in ("train", "weight"):
            if flag in item:
                message["train"] = bool(item[flag])
        messages.append(message)
    return messages


def chat_tokens(
    tokenizer: ModelTokenizer, messages: list[Message], first: int, tools: Any, options: Options
) -> Tokens:
    """Trains the assistant's turns from number `first` on."""
    turns = [
        i
        for i, message in enumerate(messages)
        if i >= first and message["role"] == "assistant" and message["content"].strip()
    ]
    if options.turns == "last":
        turns = turns[-1:]
    turns = [i for i in turns if messages[i].get("train", True)]
    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    return tokenizer.chat_tokens(plain, turns, tools)


def text_field(record: dict[str, Any], key: str, default: str | None = None) -> str:
    value = record.get(key, default)
    if value is None and key in record:
        value = default
    if not isinstance(value, str):
        raise FormatError(f"{key!r} must be text")
    return value


def alpaca_messages(record: dict[str, Any]) -> list[Message]:
    instruction = text_field(record, "instruction")
    extra = text_field(record, "input", "")
    question = f"{instruction}\n\n{extra}" if extra.strip() else instruction
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": text_field(record, "output")},
    ]
    system = text_field(record, "system", "")
    return [{"role": "system", "content": system}, *messages] if system else messages


def integers(value: Any, key: str, low: int, high: int, extra: int | None = None) -> list[int]:
    if not isinstance(value, list):
        raise FormatError(f"{key!r} must be a list of integers")
    for item in value:
        if type(item) is not int or not (low <= item < high or item == extra):
            raise FormatError(f"{key!r} holds {item!r}; the vocabulary is 0 to {high - 1}")
    return value


def given_tokens(record: dict[str, Any], vocab_size: int) -> Tokens:
    ids = integers(record["input_ids"], "input_ids", 0, vocab_size)
    labels = integers(record.get("labels", ids), "labels", 0, vocab_size, MASKED)
    mask = integers(record.get("attention_mask", [1] * len(ids)), "attention_mask", 0, 2)
    if not len(ids) == len(labels) == len(mask):
        raise FormatError(
            f"{len(ids)} input_ids, {len(labels)} labels, {len(mask)} attention_mask items"
        )
    kept = [i for i, real in enumerate(mask) if real]
    return Tokens([ids[i] for i in kept], [labels[i] for i in kept])


def record_tokens(record: Any, tokenizer: ModelTokenizer, options: Options) -> Tokens:
    """Tokens and labels of one parsed line."""
    if not isinstance(record, dict):
        raise FormatError("the line is not a JSON object")
    tools = record.get("tools")
    if "input_ids" in record:
        return given_tokens(record, tokenizer.vocab_size)
    if "messages" in record:
        messages = read_messages(record["messages"], "role", "content")
        return chat_tokens(tokenizer, messages, 0, tools, options)
    if "conversations" in record:
        messages = read_messages(record["conversations"], "from", "value")
        return chat_tokens(tokenizer, messages, 0, tools, options)
    if "instruction" in record:
        return chat_tokens(tokenizer, alpaca_messages(record), 0, tools, options)
    if "prompt" in record and "completion" in record:
        if isinstance(record["prompt"], list):
            prompt = read_messages(record["prompt"], "role", "content")
            messages = prompt + read_messages(record["completion"], "role", "content")
            return chat_tokens(tokenizer, messages, len(prompt), tools, options)
        prompt_text = text_field(record, "prompt")
        return tokenizer.text_tokens(
            prompt_text, text_field(record, "completion"), options.append_eos
        )
    if "text" in record:
        return tokenizer.text_tokens("", text_field(record, "text"), options.append_eos)
    raise FormatError(
        "no known form: messages, conversations, instruction/output, prompt/completion, text "
        f"or input_ids (keys: {', '.join(map(str, record)) or 'none'})"
    )


def read_file(
    path: Path, tokenizer: ModelTokenizer, options: Options
) -> Iterator[tuple[int, Tokens]]:
    """(line number, tokens) of every line that is not blank."""
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, record_tokens(json.loads(line), tokenizer, options)
            except UnicodeDecodeError as error:
                raise LineError(path, number, f"not UTF-8: {error.reason}") from error
            except json.JSONDecodeError as error:
                raise LineError(path, number, f"not JSON: {error.msg}") from error
            except FormatError as error:
                raise LineError(path, number, str(error)) from error
