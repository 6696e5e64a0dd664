#!/usr/bin/env python3
"""Writes tests/parity/golden: what torch, transformers and peft compute, for replay without them.

  golden/operations.safetensors   inputs, outputs and gradients of single operations, in float64
  golden/<model>/                 a tiny model as a Hugging Face directory, with
      adapter/                      a LoRA adapter as stock peft saves it
      tokens.safetensors            two samples, as launch/prepare_data.py would write them
      expected.safetensors          losses of every trained token, gradients of every factor
  golden/manifest.json            versions, and how far stock code was from the float64 formulas

Inputs are bfloat16 values, so that a replay in float64, float32 or bfloat16 starts from the same
numbers. Every random tensor is seeded by its own name: adding one changes no other. The float64
formulas are compared here with the stock classes (in the precision those work in); a difference
ends the script. CPU is enough, and takes about a minute.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any, Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peft
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IGNORE = -100
checked: dict[str, float] = {}  # largest difference of stock code from our formula, for the record


def generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def normal(name: str, *shape: int, scale: float = 1.0) -> Tensor:
    """bfloat16 values, as float64."""
    values = torch.randn(*shape, generator=generator(name), dtype=torch.float64) * scale
    return values.to(torch.bfloat16).double()


def leaf(values: Tensor) -> Tensor:
    return values.clone().requires_grad_(True)


def require_close(name: str, stock: Tensor, ours: Tensor, bound: float) -> None:
    """|stock - ours| <= bound x the largest |ours|."""
    stock, ours = stock.detach().double(), ours.detach().double()
    difference = ((stock - ours).abs().max() / ours.abs().max()).item()
    checked[name] = max(difference, checked.get(name, 0.0))
    if not difference <= bound:
        raise SystemExit(f"{name}: stock code differs from the formula by {difference:.3g}")


# ---- operations -------------------------------------------------------------------------------


def rms_norm(out: Tensors) -> None:
    rows, hidden, eps = 7, 45, 1e-5
    # Every row has its own magnitude, down to where eps counts.
    magnitude = torch.tensor([1.0, 0.01, 8.0, 0.002, 1.0, 64.0, 0.25], dtype=torch.float64)
    x = leaf(normal("rms.x", rows, hidden) * magnitude.to(torch.bfloat16).double()[:, None])
    x.data = x.data.to(torch.bfloat16).double()
    weight = leaf(1 + normal("rms.weight", hidden, scale=0.25))
    weight.data = weight.data.to(torch.bfloat16).double()
    dy = normal("rms.dy", rows, hidden)
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    y.backward(dy)
    stock = LlamaRMSNorm(hidden, eps=eps)
    stock.weight.data.copy_(weight.detach())
    x32 = leaf(x.detach().float())
    y32 = stock(x32)
    y32.backward(dy.float())
    for what, theirs, ours in [
        ("y", y32, y),
        ("dx", x32.grad, x.grad),
        ("dweight", stock.weight.grad, weight.grad),
    ]:
        require_close(f"LlamaRMSNorm {what}", theirs, ours, 2e-6)
    for name, value in {"x": x, "weight": weight, "dy": dy}.items():
        out[f"rms_norm.{name}"] = value.detach().float()
    out["rms_norm.eps"] = torch.tensor([eps], dtype=torch.float64)
    for name, value in {"y": y, "dx": x.grad, "dweight": weight.grad}.items():
        out[f"rms_norm.{name}"] = value.detach()


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rope_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> list[float]:
    frequencies = [theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is None:
        return frequencies
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = scaling["original_max_position_embeddings"]
    scaled = []
    for frequency in frequencies:
        turns = original * frequency / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))  # 1: kept, 0: stretched
        scaled.append(share * frequency + (1 - share) * frequency / factor)
    return scaled


def rope(out: Tensors) -> None:
    heads, head_dim, theta = 3, 24, 10000.0
    positions = [0, 1, 2, 5, 0, 1, 17, 63, 64, 200, 511]
    for name, scaling in [("rope_default", None), ("rope_llama3", LLAMA3)]:
        x = leaf(normal(f"{name}.x", len(positions), heads, head_dim))
        dy = normal(f"{name}.dy", len(positions), heads, head_dim)
        frequency = torch.tensor(
            rope_frequencies(head_dim, theta, scaling), dtype=torch.float64
        )
        angle = torch.tensor(positions, dtype=torch.float64)[:, None] * frequency
        # Tables are float32 everywhere; the rotation itself is float64 here.
        cos, sin = (t.float().double()[:, None, :] for t in (angle.cos(), angle.sin()))
        low, high = x[..., : head_dim // 2], x[..., head_dim // 2 :]
        y = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
        y.backward(dy)

        description = llama_config(head_dim * heads, heads, heads, 64, 16, head_dim)
        description["max_position_embeddings"] = 512
        if scaling:
            description["rope_scaling"] = scaling
        rotary = LlamaRotaryEmbedding(stock_config(description))
        x32 = leaf(x.detach().float())
        q = x32.transpose(0, 1)[None]
        stock_cos, stock_sin = rotary(q, torch.tensor([positions]))
        y32, _ = apply_rotary_pos_emb(q, q, stock_cos, stock_sin)
        y32[0].transpose(0, 1).backward(dy.float())
        # A float32 frequency is off by 2^-24, its angle by that times the position.
        require_close(f"{name} y", y32[0].transpose(0, 1), y, 1e-4)
        require_close(f"{name} dx", x32.grad, x.grad, 1e-4)
        out[f"{name}.x"], out[f"{name}.dy"] = x.detach().float(), dy.float()
        out[f"{name}.positions"] = torch.tensor(positions, dtype=torch.int32)
        out[f"{name}.y"], out[f"{name}.dx"] = y.detach(), x.grad


def attention(out: Tensors) -> None:
    for name, head_dim, lengths in [
        ("attention_16", 16, [1, 13, 4, 17]),
        ("attention_64", 64, [5, 1, 11]),
    ]:
        heads, kv_heads, tokens = 6, 2, sum(lengths)
        q, d_o = (normal(f"{name}.{n}", tokens, heads, head_dim) for n in ("q", "do"))
        k, v = (normal(f"{name}.{n}", tokens, kv_heads, head_dim) for n in ("k", "v"))
        v *= torch.tensor([1.0, 4.0], dtype=torch.float64)[None, :, None]
        q, k, v = leaf(q), leaf(k), leaf(v)
        bounds, parts, sums = [0], [], []
        for length in lengths:
            begin, end = bounds[-1], bounds[-1] + length
            bounds.append(end)

            def segment(x: Tensor) -> Tensor:
                repeat = heads // x.shape[1]
                return x[begin:end].transpose(0, 1).repeat_interleave(repeat, 0)  # [heads, t, D]

            # The segment alone, by torch's own attention: nothing can leak between segments.
            o = F.scaled_dot_product_attention(
                segment(q)[None], segment(k)[None], segment(v)[None], is_causal=True
            )[0]
            scores = segment(q) @ segment(k).transpose(1, 2) / math.sqrt(head_dim)
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
            require_close(f"{name} o", o, scores.softmax(-1) @ segment(v), 1e-12)
            parts.append(o.transpose(0, 1))
            sums.append(scores.logsumexp(-1))
        o = torch.cat(parts)
        o.backward(d_o)
        for key, value in {"q": q, "k": k, "v": v, "do": d_o}.items():
            out[f"{name}.{key}"] = value.detach().float()
        out[f"{name}.bounds"] = torch.tensor(bounds, dtype=torch.int32)
        out[f"{name}.o"], out[f"{name}.lse"] = o.detach(), torch.cat(sums, 1).detach()
        out[f"{name}.dq"], out[f"{name}.dk"], out[f"{name}.dv"] = q.grad, k.grad, v.grad


def swiglu(out: Tensors) -> None:
    gate, up = leaf(normal("swiglu.gate", 5, 37, scale=3)), leaf(normal("swiglu.up", 5, 37))
    dy = normal("swiglu.dy", 5, 37)
    y = F.silu(gate) * up
    y.backward(dy)
    for name, value in {"gate": gate, "up": up, "dy": dy}.items():
        out[f"swiglu.{name}"] = value.detach().float()
    for name, value in {"y": y, "dgate": gate.grad, "dup": up.grad}.items():
        out[f"swiglu.{name}"] = value.detach()


def cross_entropy(out: Tensors) -> None:
    rows, vocabulary, scale = 9, 53, 0.125
    logits = normal("ce.logits", rows, vocabulary, scale=4)
    logits[3] += 96  # the maximum must be taken out
    logits = leaf(logits.to(torch.bfloat16).double())
    labels = torch.randint(vocabulary, (rows,), generator=generator("ce.labels"))
    losses = F.cross_entropy(logits, labels, reduction="none")
    (losses.sum() * scale).backward()
    out["cross_entropy.logits"] = logits.detach().float()
    out["cross_entropy.labels"] = labels.int()
    out["cross_entropy.scale"] = torch.tensor([scale], dtype=torch.float64)
    out["cross_entropy.losses"], out["cross_entropy.dlogits"] = losses.detach(), logits.grad


def lora_linear(out: Tensors) -> None:
    """A linear layer with a bias and a peft adapter, by peft's own module."""
    tokens, inputs, outputs, r, alpha = 11, 37, 29, 4, 6
    holder = torch.nn.Sequential(torch.nn.Linear(inputs, outputs)).double()
    model = get_peft_model(holder, LoraConfig(r=r, lora_alpha=alpha, target_modules=["0"]))
    model = model.double()
    layer = model.base_model.model[0]
    values = {
        "weight": normal("lora.weight", outputs, inputs, scale=inputs**-0.5),
        "bias": normal("lora.bias", outputs),
        "a": normal("lora.a", r, inputs, scale=inputs**-0.5),
        "b": normal("lora.b", outputs, r),
    }
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    targets = {"weight": layer.base_layer.weight, "bias": layer.base_layer.bias, "a": a, "b": b}
    for name, parameter in targets.items():
        parameter.data.copy_(values[name])
    x = leaf(normal("lora.x", tokens, inputs))
    dy = normal("lora.dy", tokens, outputs)
    y = model(x)
    y.backward(dy)
    for name, value in {**values, "x": x.detach(), "dy": dy}.items():
        out[f"lora.{name}"] = value.float()
    out["lora.scale"] = torch.tensor([alpha / r], dtype=torch.float64)
    for name, value in {"y": y.detach(), "dx": x.grad, "da": a.grad, "db": b.grad}.items():
        out[f"lora.{name}"] = value


# ---- whole models -----------------------------------------------------------------------------


def llama_config(
    hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, head_dim: int
) -> dict[str, Any]:
    """config.json as published models have it (before transformers 5 renamed keys)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "initializer_range": 0.02,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def stock_config(description: dict[str, Any]) -> Any:
    # A copy: transformers writes into the dictionaries it is given.
    return CONFIG_MAPPING[description["model_type"]].from_dict(copy.deepcopy(description))


def models() -> dict[str, dict[str, Any]]:
    llama = llama_config(96, 3, 1, 200, 131, 32)
    llama |= {"tie_word_embeddings": True, "rope_theta": 500000.0, "rope_scaling": LLAMA3}
    llama["mlp_bias"] = False

    qwen2 = llama_config(80, 5, 1, 152, 131, 16)
    del qwen2["head_dim"], qwen2["attention_bias"]  # Qwen2 files have neither
    qwen2 |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    qwen2 |= {"rms_norm_eps": 1e-6, "use_sliding_window": False, "rope_theta": 1000000.0}

    qwen3 = llama_config(72, 3, 1, 136, 131, 32)  # heads x head_dim is not hidden_size
    qwen3 |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    qwen3 |= {"rms_norm_eps": 1e-6, "use_sliding_window": False, "rope_theta": 1000000.0}

    fp8 = llama_config(160, 5, 1, 208, 131, 32)  # 1 1/4 and 1 5/8 blocks
    fp8["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    return {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "llama_fp8": fp8}


def model_tensors(name: str, config: dict[str, Any]) -> Tensors:
    """Random weights under their Hugging Face names, float64 holding bfloat16 values."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    tensors: Tensors = {}

    def matrix(key: str, rows: int, cols: int, scale: float) -> None:
        tensors[key] = normal(f"{name}.{key}", rows, cols, scale=scale)

    def norm(key: str, size: int) -> None:
        values = 1 + normal(f"{name}.{key}", size, scale=0.2)
        tensors[key] = values.to(torch.bfloat16).double()

    matrix("model.embed_tokens.weight", config["vocab_size"], hidden, 0.3)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm.weight", hidden)
        norm(f"{prefix}.post_attention_layernorm.weight", hidden)
        if config["model_type"] == "qwen3":
            norm(f"{prefix}.self_attn.q_norm.weight", head_dim)
            norm(f"{prefix}.self_attn.k_norm.weight", head_dim)
        for key, rows, cols in [
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", ffn, hidden),
            ("mlp.up_proj", ffn, hidden),
            ("mlp.down_proj", hidden, ffn),
        ]:
            matrix(f"{prefix}.{key}.weight", rows, cols, cols**-0.5)
            if config["model_type"] == "qwen2" and key[-6:] in ("q_proj", "k_proj", "v_proj"):
                bias = f"{prefix}.{key}.bias"
                tensors[bias] = normal(f"{name}.{bias}", rows, scale=0.5)
    norm("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", config["vocab_size"], hidden, 2 * hidden**-0.5)
    return tensors


def is_block_linear(key: str) -> bool:
    return key.startswith("model.layers.") and key.endswith("_proj.weight")


def quantize_blocks(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The file's tensors with e4m3 codes and arbitrary float32 scales, and what they stand for."""
    stored: Tensors = {}
    meant: Tensors = {}
    for key, values in tensors.items():
        if not is_block_linear(key):
            stored[key], meant[key] = values.to(torch.bfloat16), values
            continue
        rows, cols = values.shape
        grid = (-(-rows // 128), -(-cols // 128))
        # Every block at its own magnitude, and a scale that is no power of two.
        spread = torch.rand(*grid, generator=generator(f"fp8.{key}"), dtype=torch.float64)
        scales = torch.empty(grid, dtype=torch.float32)
        codes = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
        for i in range(grid[0]):
            for j in range(grid[1]):
                block = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
                part = values[block] * (0.5 + 1.5 * spread[i, j])
                scale = (part.abs().max() / 448 * (1 + 0.7 * spread[i, j])).float()
                scales[i, j] = scale
                codes[block] = (part / scale.double()).float().to(torch.float8_e4m3fn)
        wide = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        stored[key], stored[f"{key}_scale_inv"] = codes, scales
        meant[key] = codes.float().double() * wide[:rows, :cols]
    return stored, meant


def loading_problems(info: Any) -> list[str]:
    def get(key: str) -> list[str]:
        value = info.get(key) if isinstance(info, dict) else getattr(info, key, None)
        return [f"{key}: {item}" for item in value or []]

    return [p for k in ("missing_keys", "unexpected_keys", "mismatched_keys") for p in get(k)]


def load_stock(directory: str) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    if problems := loading_problems(info):
        raise SystemExit(f"{directory} does not load in transformers: {problems}")
    return model


def samples(name: str, vocabulary: int) -> list[tuple[Tensor, Tensor]]:
    """(ids, labels not shifted) of two samples; a prompt and one token in between are masked."""
    result = []
    for index, (length, prompt) in enumerate([(19, 6), (12, 3)]):
        ids = torch.randint(3, vocabulary, (length,), generator=generator(f"{name}.ids{index}"))
        labels = ids.clone()
        labels[:prompt] = IGNORE
        labels[length - 4] = IGNORE
        result.append((ids, labels))
    return result


def token_losses(model: torch.nn.Module, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Losses of the trained tokens, sample after sample; each sample runs alone."""
    losses = []
    for ids, labels in batch:
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        kept = labels[1:] != IGNORE
        picked = logits[:-1][kept].double()
        losses.append(F.cross_entropy(picked, labels[1:][kept], reduction="none"))
    return torch.cat(losses)


def quantized(x: Tensor) -> Tensor:
    """x through e4m3 by groups of 128 along the last dimension, with power-of-two scales."""
    flat = x.detach().float().reshape(-1, x.shape[-1])
    pad = -flat.shape[1] % 128
    groups = F.pad(flat, (0, pad)).reshape(flat.shape[0], -1, 128)
    amax = groups.abs().amax(-1, keepdim=True)
    multiplier = torch.where(amax > 0, 448 / amax, torch.ones_like(amax))
    _, exponent = torch.frexp(multiplier)
    multiplier = torch.ldexp(torch.ones_like(amax), exponent - 1)
    codes = (groups * multiplier).to(torch.float8_e4m3fn)
    decoded = codes.float().double() / multiplier.double()
    return decoded.reshape(flat.shape[0], -1)[:, : flat.shape[1]].reshape(x.shape)


class Fp8Linear(torch.autograd.Function):
    """Both products of a frozen linear layer with activations and gradients in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return quantized(x) @ weight.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return quantized(dy) @ weight, None


def losses_and_gradients(model: PeftModel, batch: list[tuple[Tensor, Tensor]]) -> Tensors:
    """Token losses, and gradients of their mean by the names of the adapter's file."""
    model.zero_grad()
    losses = token_losses(model, batch)
    losses.mean().backward()
    result = {"token_losses": losses.detach()}
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            if parameter.grad is None or not parameter.grad.abs().max() > 0:
                raise SystemExit(f"{key} has no gradient")
            result["gradient." + key.replace(".default.", ".")] = parameter.grad.float()
    return result


def make_model(name: str, config: dict[str, Any], out: Path) -> None:
    """Runs inside `out`, so that the adapter's base_model_name_or_path is a relative name."""
    tensors = model_tensors(name, config)
    is_fp8 = "quantization_config" in config
    plain = {k: v for k, v in config.items() if k != "quantization_config"}
    directory = out / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if is_fp8:
        stored, meant = quantize_blocks(tensors)
        save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_config(stock_config(plain))
        model.load_state_dict({k: v.float() for k, v in meant.items()}, strict=True)
    else:
        meant = tensors
        stored = {k: v.to(torch.bfloat16) for k, v in tensors.items()}
        save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
        if config["model_type"] != "qwen2":  # qwen2 stays in the older form of config.json
            with tempfile.TemporaryDirectory() as scratch:
                model = load_stock(name).to(torch.bfloat16)
                model.save_pretrained(scratch)
                del model
                shutil.rmtree(directory)
                shutil.copytree(scratch, directory)
                directory.chmod(0o755)
        model = load_stock(name)
    batch = samples(name, config["vocab_size"])
    expected: Tensors = {}

    model = model.float().eval()
    adapter = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=LINEARS, task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, adapter).eval()
    for key, parameter in model.named_parameters():
        if "lora_" not in key:
            continue
        scale = parameter.shape[1] ** -0.5 if "lora_A" in key else 0.2
        # Not bfloat16 values: the factors are float32 in a file.
        values = torch.randn(parameter.shape, generator=generator(f"{name}.{key}")) * scale
        parameter.data.copy_(values)
    model.save_pretrained(f"{name}/adapter", save_embedding_layers=False)
    (directory / "adapter" / "README.md").unlink(missing_ok=True)

    # From here on in float64, with the weights exactly as the file means them.
    model = model.double()
    seen = set()
    for key, parameter in model.get_base_model().named_parameters():
        key = key.replace(".base_layer.", ".")
        if "lora_" not in key:
            parameter.data.copy_(meant[key])
            seen.add(key)
    if seen != set(meant):
        raise SystemExit(f"{name}: weights not used: {sorted(set(meant) ^ seen)}")
    with torch.no_grad(), model.disable_adapter():
        expected["base_token_losses"] = token_losses(model, batch)
    expected |= losses_and_gradients(model, batch)
    if (expected["token_losses"] - expected["base_token_losses"]).abs().min() < 1e-6:
        raise SystemExit(f"{name}: the adapter changes nothing")

    if is_fp8:
        for key, layer in model.named_modules():
            if key.rpartition(".")[2] in LINEARS:
                base = layer.base_layer
                base.forward = lambda x, w=base.weight: Fp8Linear.apply(x, w)
        for key, value in losses_and_gradients(model, batch).items():
            expected[f"fp8.{key}"] = value
    else:
        # The directory as stock peft loads it gives the same losses.
        again = PeftModel.from_pretrained(load_stock(name), f"{name}/adapter").eval().double()
        with torch.no_grad():
            require_close(
                f"{name} reloaded", token_losses(again, batch), expected["token_losses"], 1e-12
            )
        written = load_file(directory / "model.safetensors")
        for key, value in stored.items():
            if not torch.equal(written[key], value):
                raise SystemExit(f"{name}: {key} changed when transformers saved it")

    offsets = [0]
    for ids, _ in batch:
        offsets.append(offsets[-1] + len(ids))
    save_file(
        {
            "input_ids": torch.cat([ids for ids, _ in batch]).int(),
            "labels": torch.cat([labels for _, labels in batch]).int(),
            "sample_offsets": torch.tensor(offsets, dtype=torch.int64),
        },
        directory / "tokens.safetensors",
        metadata={"format": "rowshard.tokens", "version": "1"},
    )
    save_contiguous(expected, directory / "expected.safetensors")
    for mode in ["", "fp8."] if is_fp8 else [""]:
        mean = expected[f"{mode}token_losses"].mean().item()
        print(f"{name}: {mode}loss {mean:.6f}, base {expected['base_token_losses'].mean():.6f}")


def save_contiguous(tensors: Tensors, path: Path) -> None:
    save_file({k: v.detach().clone().contiguous() for k, v in tensors.items()}, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).resolve().parent / "golden"
    parser.add_argument("--output-dir", type=Path, default=default, help="replaced as a whole")
    out = parser.parse_args().output_dir.resolve()
    torch.set_num_threads(1)  # one summation order
    torch.manual_seed(0)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.chdir(out)
    operations: Tensors = {}
    makers: list[Callable[[Tensors], None]] = [
        rms_norm, rope, attention, swiglu, cross_entropy, lora_linear
    ]  # fmt: skip
    for maker in makers:
        maker(operations)
    save_contiguous(operations, out / "operations.safetensors")
    for name, config in models().items():
        make_model(name, config, out)
    manifest = {
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
        "stock_difference": checked,
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 2**20:.2f} MiB")
    if size > 4 << 20:
        raise SystemExit("more than 4 MiB of golden files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
