"""What the Python tests share: import paths and a tiny model directory."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# At the end: launch/ holds a tokenize.py, and the standard library's must win.
for folder in ("launch", "tests/parity"):
    if str(ROOT / folder) not in sys.path:
        sys.path.append(str(ROOT / folder))

SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like Llama-3: a BOS of its own, contents trimmed.
TRIMMING = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] | trim "
    "+ '<|im_end|>' }}{% endfor %}"
)
# Like Qwen3: thinking is removed from every turn but the last.
THINKING = (
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if not loop.last and '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
)
# Like Llama-2: a space, then the end-of-sequence token.
SPACED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST] ' }}"
    "{% else %}{{ m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Prints every content twice: nothing can be masked in it.
ECHOING = "{% for m in messages %}{{ m['content'] + '/' + m['content'] }}{% endfor %}"


def make_model(directory: Path, template: str | None = CHATML, adds_bos: bool = False) -> Path:
    """A model directory with a byte-level tokenizer (one token a byte) and no weights."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 0)]
        )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": "llama", "vocab_size": len(vocabulary), "max_position_embeddings": 512}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_lines(path: Path, *records: Any) -> Path:
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    path.write_text(text, encoding="utf-8")
    return path


def run_tool(name: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """A script of launch/, as a user starts it."""
    command = [sys.executable, str(ROOT / "launch" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def call_tool(
    main: Callable[[list[str]], int], *arguments: Any
) -> subprocess.CompletedProcess[str]:
    """The same without a new process: loading the tokenizer library takes seconds each time."""
    out, err = io.StringIO(), io.StringIO()
    command = [str(argument) for argument in arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(command)
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())
