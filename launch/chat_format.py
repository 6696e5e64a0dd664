"""Renders chats with the model's own template and finds which tokens are the assistant's.

The mask is made from text positions, not by rendering prefixes and taking differences: some
templates rewrite earlier turns (Qwen3 removes their thinking), so prefixes do not nest. Each turn
to be trained is rendered once more with a marker in place of its content; what stands between the
markers is template, and the true rendering must consist of exactly those pieces with the contents
between them. Whatever does not fit is refused instead of guessed.
"""

import hashlib
import json
import os
import unicodedata
from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

MASKED = -100

Message = dict[str, Any]


class FormatError(Exception):
    """A sample, model directory or template that cannot be used; the message says why."""


class Tokens(NamedTuple):
    """One sample: labels stand at the same positions as ids, MASKED where nothing is learnt."""

    ids: list[int]
    labels: list[int]

    def trainable(self) -> int:
        """Labels that some position predicts: the first token is predicted by none."""
        return sum(label != MASKED for label in self.labels[1:])


class ModelTokenizer:
    """Tokenizer and chat template of a Hugging Face model directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        config_file = directory / "config.json"
        if not directory.is_dir():
            raise FormatError(f"{directory}: no such model directory")
        if not config_file.is_file():
            raise FormatError(f"{directory}: no config.json")
        try:
            config = json.loads(config_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise FormatError(f"{config_file}: {error}") from error
        config = config.get("text_config", config)
        if "vocab_size" not in config:
            raise FormatError(f"{config_file}: no key vocab_size")
        self.vocab_size: int = config["vocab_size"]
        self.max_length: int | None = config.get("max_position_embeddings")
        self._tokenizer = self._load(directory)
        # Every added token, whether called special or not: turn terminators are among them.
        self._added = set(self._tokenizer.added_tokens_decoder)

    @staticmethod
    def _load(directory: Path) -> Any:
        from transformers import AutoTokenizer  # late: it takes a second to import

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises many kinds
            reason = str(error).strip().splitlines()[0]
            raise FormatError(f"{directory}: cannot load its tokenizer: {reason}") from error
        if not tokenizer.is_fast:
            raise FormatError(f"{directory}: needs a tokenizer.json (a fast tokenizer)")
        return tokenizer

    @property
    def fingerprint(self) -> str:
        """Names the tokenizer a token file was made with."""
        file = self.directory / "tokenizer.json"
        data = file.read_bytes() if file.is_file() else b""
        return "sha256:" + hashlib.sha256(data).hexdigest()[:16]

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode_plain(self, text: str) -> list[int]:
        """Text as the model wants it: with a BOS where the tokenizer adds one, never two."""
        ids = self._tokenizer(text, add_special_tokens=True).input_ids
        return self._single_bos(self._without_eos(ids, text))

    def encode_chat_prompt(self, messages: list[Message]) -> list[int]:
        """A chat up to where the assistant's answer begins."""
        text = self.render(messages, prompt=True)
        return self._single_bos(self._tokenizer(text, add_special_tokens=False).input_ids)

    def decode(self, ids: list[int], keep_special: bool = False) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
        )

    def render(self, messages: list[Message], tools: Any = None, prompt: bool = False) -> str:
        if not self.has_template:
            raise FormatError("the model has no chat template; use prompt/completion or text lines")
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # whatever a template's Jinja code raises
            raise FormatError(f"the chat template refuses these messages: {error}") from error

    def text_tokens(self, prompt: str, completion: str, append_eos: bool) -> Tokens:
        """Plain text: the prompt is masked, the completion and an end of sequence are trained."""
        if prompt:
            # As at inference time: the prompt is tokenised alone, the completion follows it.
            ids = self.encode_plain(prompt)
            masked = len(ids)
            ids += self._tokenizer(completion, add_special_tokens=False).input_ids
        else:
            ids = self.encode_plain(completion)
            masked = 1 if ids and ids[0] == self._tokenizer.bos_token_id else 0
        eos = self._tokenizer.eos_token_id
        if append_eos and eos is not None and (not ids or ids[-1] != eos):
            ids.append(eos)
        return Tokens(ids, [MASKED] * masked + ids[masked:])

    def chat_tokens(self, messages: list[Message], trained: list[int], tools: Any) -> Tokens:
        """A rendered chat in which the turns numbered in `trained` are learnt, with terminators."""
        text = self.render(messages, tools)
        spans = self._content_spans(text, messages, trained, tools)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = list(encoded.input_ids)
        offsets: list[tuple[int, int]] = encoded.offset_mapping
        labels = [MASKED] * len(ids)
        starts = [begin for begin, _ in offsets]
        for begin, end in spans:
            rows = [i for i, (a, b) in enumerate(offsets) if a >= begin and a < end and b > a]
            if rows:
                self._check_span(text, ids, offsets, rows)
            rows += self._terminator(text, ids, offsets, bisect_right(starts, end - 1), end)
            for row in rows:
                labels[row] = ids[row]
        single = self._single_bos(ids)
        return Tokens(single, labels[len(ids) - len(single) :])

    def _content_spans(
        self, text: str, messages: list[Message], trained: list[int], tools: Any
    ) -> list[tuple[int, int]]:
        """Where in `text` the contents of the trained turns stand."""
        if not trained:
            return []
        marked = [dict(message) for message in messages]
        markers = []
        for turn in trained:
            # Letters only: nothing a template trims, splits or escapes.
            marker = f"zqMARK{turn}x{hashlib.sha256(text.encode()).hexdigest()[:12]}MARKqz"
            markers.append(marker)
            marked[turn]["content"] = marker
        rest = self.render(marked, tools)
        pieces: list[str] = []
        for marker in markers:
            before, found, rest = rest.partition(marker)
            if not found or marker in rest:
                raise FormatError("the chat template does not print each turn's content once")
            pieces.append(before)
        pieces.append(rest)

        spans: list[tuple[int, int]] = []
        place = 0
        for number, turn in enumerate(trained):
            if not text.startswith(pieces[number], place):
                raise FormatError("the chat template changes the text around a turn; cannot mask")
            begin = place + len(pieces[number])
            end = self._content_end(text, begin, messages[turn]["content"], pieces[number + 1])
            spans.append((begin, end))
            place = end
        if text[place:] != pieces[-1]:
            raise FormatError("the chat template changes the text around a turn; cannot mask")
        return spans

    @staticmethod
    def _content_end(text: str, begin: int, content: str, piece: str) -> int:
        """End of a turn's content: as written, as trimmed, or up to the next template piece."""
        for form in (content, content.strip()):
            if text.startswith(form + piece, begin):
                return begin + len(form)
        if piece and (found := text.find(piece, begin)) >= 0:
            return found
        raise FormatError("the chat template changes the content of a turn; cannot mask")

    def _terminator(
        self, text: str, ids: list[int], offsets: list[tuple[int, int]], row: int, end: int
    ) -> list[int]:
        """Tokens that end the turn: an added token right behind the content, spaces before it too.

        Without it the model never learns to stop.
        """
        rows: list[int] = []
        for i in range(row, len(ids)):
            begin, finish = offsets[i]
            if begin < end:
                continue
            rows.append(i)
            if ids[i] in self._added:
                return rows
            if text[begin:finish].strip():
                break
        return []

    def _check_span(
        self, text: str, ids: list[int], offsets: list[tuple[int, int]], rows: list[int]
    ) -> None:
        """The unmasked tokens must read back as the text they stand for."""

        def plain(value: str) -> str:
            return unicodedata.normalize("NFC", value).strip()

        decoded = self.decode([ids[row] for row in rows], keep_special=True)
        expected = text[offsets[rows[0]][0] : offsets[rows[-1]][1]]
        if plain(decoded) != plain(expected):
            raise FormatError(f"unmasked tokens read {decoded[:60]!r}, not {expected[:60]!r}")

    def _single_bos(self, ids: list[int]) -> list[int]:
        """Template and tokenizer may both have put a BOS in front."""
        bos = self._tokenizer.bos_token_id
        while bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
            ids = ids[1:]
        return ids

    def _without_eos(self, ids: list[int], text: str) -> list[int]:
        """Some tokenizers end every text with EOS; a prompt must stay open."""
        eos = self._tokenizer.eos_token
        if ids and eos and ids[-1] == self._tokenizer.eos_token_id and not text.endswith(eos):
            return ids[:-1]
        return ids
