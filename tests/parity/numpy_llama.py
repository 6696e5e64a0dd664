#!/usr/bin/env python3
"""A Llama forward pass in NumPy fp32: the slow, independent reading of a model directory.

It shares no code with the C++ program and needs no torch, so it can say whether a converted
model is right, and what loss `rowshard evaluate --recipe bf16` should come near. Weights are read
as stored (bf16, fp16 or fp32) and everything is computed in fp32; a LoRA adapter is merged in.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

Array = np.ndarray


def read_safetensors(path: Path) -> dict[str, Array]:
    """All tensors of one file, floating point ones widened to fp32."""
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    length = int(raw[:8].view("<u8")[0])
    header = json.loads(raw[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    kinds = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}
    out: dict[str, Array] = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(raw[begin:end].tobytes(), dtype=kinds[entry["dtype"]])
        if entry["dtype"] == "BF16":
            flat = (flat.astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F16":
            flat = flat.astype(np.float32)
        out[name] = flat.reshape(entry["shape"])
    return out


class NumpyLlama:
    """Decoder of the Llama family: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    def __init__(self, directory: Path, adapter: Path | None = None) -> None:
        self.config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.weights: dict[str, Array] = {}
        for path in sorted(directory.glob("*.safetensors")):
            self.weights.update(read_safetensors(path))
        if adapter is not None:
            self._merge(adapter)
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config["num_key_value_heads"]
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.heads
        self.layers = self.config["num_hidden_layers"]
        self.eps = np.float32(self.config["rms_norm_eps"])
        if self.config.get("rope_scaling"):
            raise ValueError("rope_scaling is not supported here")

    def _merge(self, adapter: Path) -> None:
        """W += alpha / r · B·A for each adapted matrix of a PEFT directory."""
        settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        scale = np.float32(settings["lora_alpha"] / settings["r"])
        tensors = read_safetensors(adapter / "adapter_model.safetensors")
        for name, a in tensors.items():
            if not name.endswith("lora_A.weight"):
                continue
            b = tensors[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            self.weights[target] = self.weights[target] + scale * (b @ a)

    def _norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.weights[name]

    def _linear(self, x: Array, name: str) -> Array:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _rotate(self, x: Array, start: int) -> Array:
        """Rotate-half RoPE on x [heads, T, d], whose first token stands at position `start`."""
        half = self.head_dim // 2
        exponent = np.arange(half, dtype=np.float32) / half
        frequency = np.float32(self.config["rope_theta"]) ** -exponent
        angle = np.arange(start, start + x.shape[1], dtype=np.float32)[:, None] * frequency
        cos, sin = np.cos(angle), np.sin(angle)
        low, high = x[..., :half], x[..., half:]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    def _attention(self, x: Array, prefix: str, cache: dict[str, Array]) -> Array:
        length = x.shape[0]

        def split(name: str, heads: int) -> Array:
            projected = self._linear(x, f"{prefix}.{name}")
            return projected.reshape(length, heads, self.head_dim).swapaxes(0, 1)

        past = cache["k" + prefix].shape[1] if "k" + prefix in cache else 0
        q = self._rotate(split("q_proj", self.heads), past)
        k = self._rotate(split("k_proj", self.kv_heads), past)
        v = split("v_proj", self.kv_heads)
        if past:
            k = np.concatenate([cache["k" + prefix], k], 1)
            v = np.concatenate([cache["v" + prefix], v], 1)
        cache["k" + prefix], cache["v" + prefix] = k, v
        group = self.heads // self.kv_heads
        k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
        scores = q @ k.swapaxes(1, 2) / np.float32(np.sqrt(self.head_dim))
        visible = np.tri(length, past + length, past, dtype=bool)
        scores = np.where(visible, scores, np.float32(-np.inf))
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = scores / scores.sum(-1, keepdims=True) @ v
        return self._linear(mixed.swapaxes(0, 1).reshape(length, -1), f"{prefix}.o_proj")

    def forward(self, ids: list[int] | Array, cache: dict[str, Array] | None = None) -> Array:
        """Logits [T, vocabulary] of the tokens, which follow those already in the cache."""
        cache = {} if cache is None else cache
        x = self.weights["model.embed_tokens.weight"][np.asarray(ids)]
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            normed = self._norm(x, f"{prefix}.input_layernorm.weight")
            x = x + self._attention(normed, f"{prefix}.self_attn", cache)
            normed = self._norm(x, f"{prefix}.post_attention_layernorm.weight")
            gate = self._linear(normed, f"{prefix}.mlp.gate_proj")
            up = self._linear(normed, f"{prefix}.mlp.up_proj")
            x = x + self._linear(gate / (1 + np.exp(-gate)) * up, f"{prefix}.mlp.down_proj")
        x = self._norm(x, "model.norm.weight")
        tied = self.weights["model.embed_tokens.weight"]
        return x @ self.weights.get("lm_head.weight", tied).T

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """Up to `count` continuation ids; ends before an end-of-sequence id."""
        ends = self.config["eos_token_id"]
        ends = ends if isinstance(ends, list) else [ends]
        cache: dict[str, Array] = {}
        out: list[int] = []
        step = list(ids)
        while len(out) < count:
            token = int(self.forward(step, cache)[-1].argmax())
            if token in ends:
                break
            out.append(token)
            step = [token]
        return out

    def loss(self, tokens: Path) -> tuple[float, int]:
        """Mean loss over the trainable tokens of a token file, and how many there are."""
        data = read_safetensors(tokens)
        total, count = 0.0, 0
        offsets = data["sample_offsets"]
        for begin, end in zip(offsets[:-1], offsets[1:]):
            labels = data["labels"][begin:end][1:]
            logits = self.forward(data["input_ids"][begin:end])[:-1]
            rows = np.flatnonzero(labels != -100)
            picked = logits[rows].astype(np.float64)
            top = picked.max(-1, keepdims=True)
            log_sum = np.log(np.exp(picked - top).sum(-1)) + top[:, 0]
            total += float((log_sum - picked[np.arange(rows.size), labels[rows]]).sum())
            count += rows.size
        return total / count, count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, help="PEFT adapter directory to merge in")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt-ids", help="comma-separated ids to continue")
    what.add_argument("--data", type=Path, help="token file to report the loss of")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    model = NumpyLlama(arguments.model, arguments.adapter)
    if arguments.data:
        loss, count = model.loss(arguments.data)
        print(f"loss {loss:.6f} over {count} tokens")
    else:
        prompt = [int(part) for part in arguments.prompt_ids.split(",")]
        print("ids:", ",".join(map(str, model.greedy(prompt, arguments.max_new_tokens))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
