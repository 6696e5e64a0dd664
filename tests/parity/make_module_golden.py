#!/usr/bin/env python3
"""Writes tests/parity/golden/modules.safetensors: outputs and gradients of the four modules, by
PyTorch's autograd in float64 on the dequantised operands. tests/unit/layers/module_golden_test.cpp
replays it.

Inputs are not stored: both sides make them by the same formula, `values`, exact in bfloat16. Of
every result each kStride-th element is stored, as float64, and its Euclidean norm.

FP8 layers: x and dy pass through e4m3 in groups of 1x128 (along the features for fprop and dgrad,
along the tokens for wgrad), the weight in blocks of 128x128, scales cut to powers of two. The
product, the chain through norms and activations, adapters and biases are autograd's, in float64.

    python3 tests/parity/make_module_golden.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

Tensor = torch.Tensor
STRIDE = 21
TOKENS, HIDDEN, FFN, RANK = 48, 144, 160, 4
ROWS = [21, 0, 27]  # of the experts
SCALE, EPS = 0.5, 1e-5
FILE = Path(__file__).resolve().parent / "golden" / "modules.safetensors"


def values(rows: int, cols: int, seed: int, exponent: int) -> Tensor:
    """Eight-bit integers from a hash of place and seed, times a power of two for each 128-tile."""
    i = torch.arange(rows * cols, dtype=torch.int64)
    h = ((i + 1) * 2654435761 + seed * 40503) % 2**32
    h = ((h ^ (h >> 15)) * 2246822519) % 2**32
    h = ((h ^ (h >> 13)) * 3266489917) % 2**32
    v = ((h >> 20) % 256 - 128).double() / 64
    tile = (i // cols // 128 * 3 + i % cols // 128) % 4
    return (v * torch.exp2((tile + exponent).double())).reshape(rows, cols)


def quantize_rows(x: Tensor) -> Tensor:
    """Through e4m3 in groups of 128 along the last dimension."""
    if x.numel() == 0:  # an expert without tokens
        return x
    parts = []
    for group in x.float().split(128, dim=-1):
        amax = group.abs().amax(dim=-1, keepdim=True)
        ratio = torch.where(amax > 0, 448.0 / amax.clamp(min=1e-38), torch.ones_like(amax))
        multiplier = (ratio.view(torch.int32) & 0x7F800000).view(torch.float32)
        codes = (group * multiplier).to(torch.float8_e4m3fn)
        parts.append(codes.double() / multiplier.double())
    return torch.cat(parts, dim=-1)


def quantize_columns(x: Tensor) -> Tensor:
    return quantize_rows(x.T.contiguous()).T


def quantize_blocks(w: Tensor) -> Tensor:
    """Through e4m3 in blocks of 128x128."""
    bands = [torch.cat([block(b) for b in band.split(128, dim=1)], dim=1)
             for band in w.split(128, dim=0)]
    return torch.cat(bands, dim=0)


def block(b: Tensor) -> Tensor:
    b = b.float()
    amax = b.abs().max()
    multiplier = ((448.0 / amax).view(torch.int32) & 0x7F800000).view(torch.float32)
    return (b * multiplier).to(torch.float8_e4m3fn).double() / multiplier.double()


class Product(torch.autograd.Function):
    """x · wᵀ whose operands are quantised as the layer quantises them."""

    @staticmethod
    def forward(ctx, x, w, override):
        ctx.save_for_backward(x, w)
        ctx.override = override
        return quantize_rows(x) @ quantize_blocks(w).T

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        if ctx.override == "high_precision":
            operands = [(x, w, dy, dy)]
        elif ctx.override == "dequantized":
            operands = [(quantize_rows(x), quantize_blocks(w), dy, dy)]
        else:
            operands = [(quantize_columns(x), quantize_blocks(w), quantize_rows(dy),
                         quantize_columns(dy))]
        (xw, wd, dy_d, dy_w), = operands
        xw, wd = xw.detach().requires_grad_(), wd.detach().requires_grad_()
        with torch.enable_grad():
            y = xw @ wd.T
            dx, = torch.autograd.grad(y, xw, dy_d, retain_graph=True)
            dw, = torch.autograd.grad(y, wd, dy_w)
        return dx, dw, None


class Case:
    def __init__(self, how: str, override: str = "none"):
        self.how, self.override, self.leaves = how, override, {}

    def leaf(self, name: str, value: Tensor) -> Tensor:
        self.leaves[name] = value.clone().requires_grad_(True)
        return self.leaves[name]

    def linear(self, x: Tensor, name: str, n: int, k: int, seed: int) -> Tensor:
        w = self.leaf(f"{name}.w", values(n, k, seed, -6))
        bias = self.leaf(f"{name}.bias", values(1, n, seed + 1, 0)[0])
        a = self.leaf(f"{name}.a", values(RANK, k, seed + 2, -5))
        b = self.leaf(f"{name}.b", values(n, RANK, seed + 3, -4))
        base = x @ w.T if self.how == "plain" else Product.apply(x, w, self.override)
        return base + bias + SCALE * (x @ a.T) @ b.T

    def norm(self, x: Tensor, kind: str) -> Tensor:
        weight = self.leaf("norm.w", values(1, x.shape[-1], 5, 0)[0])
        if kind == "rms":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
        bias = self.leaf("norm.bias", values(1, x.shape[-1], 6, -2)[0])
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def activation(kind: str, gate: Tensor, up: Tensor | None) -> Tensor:
    if kind == "swiglu":
        return F.silu(gate) * up
    value = F.gelu(gate, approximate="tanh")
    return value if kind == "gelu" else value * up


def forward(case: Case, module: str, x: Tensor) -> Tensor:
    name, _, kind = module.partition("_")
    if name == "linear":
        return case.linear(x, "linear", FFN, HIDDEN, 20)
    if name == "norm":
        h = case.norm(x, kind)
        return torch.cat([case.linear(h, "q", FFN, HIDDEN, 20), case.linear(h, "k", FFN, HIDDEN, 30)])
    if name == "mlp":
        h = case.norm(x, "layer" if kind == "gelu" else "rms")
        gate = case.linear(h, "gate", FFN, HIDDEN, 20)
        up = None if kind == "gelu" else case.linear(h, "up", FFN, HIDDEN, 30)
        return case.linear(activation(kind, gate, up), "down", HIDDEN, FFN, 40)
    experts = [case.linear(part, f"expert{e}", FFN, HIDDEN, 20 + 10 * e)
               for e, part in enumerate(x.split(ROWS))]
    return torch.cat(experts)


def main() -> None:
    out: dict[str, Tensor] = {}

    def put(name: str, value: Tensor) -> None:
        flat = value.detach().double().flatten()
        out[name] = flat[::STRIDE].clone()
        out[name + ".norm"] = flat.norm().reshape(1)

    modules = ["linear", "norm_rms", "norm_layer", "mlp_swiglu", "mlp_geglu", "mlp_gelu", "grouped"]
    ways = [("plain", "none"), ("fp8", "none")]
    for module in modules:
        more = [("fp8", "dequantized"), ("fp8", "high_precision")] if module == "linear" else []
        for how, override in ways + more:
            case = Case(how, override)
            x = case.leaf("x", values(TOKENS, HIDDEN, 1, -1))
            y = forward(case, module, x)
            y.backward(values(y.shape[0], y.shape[1], 2, -4))
            prefix = f"{module}.{how if override == 'none' else override}"
            put(f"{prefix}.y", y)
            for name, leaf in case.leaves.items():
                put(f"{prefix}.d{name}", leaf.grad)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(out, str(path), metadata={"torch": torch.__version__})
    print(f"{path}: {len(out)} tensors, {path.stat().st_size} bytes, torch {torch.__version__}")


if __name__ == "__main__":
    main()
