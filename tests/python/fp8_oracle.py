#!/usr/bin/env python3
"""FP8 quantisation in NumPy, written from the rule alone, and the golden file made with it.

tests/unit/fp8/golden_test.cpp replays the file on either device. To change the cases, edit CASES and
run this script; test_fp8_oracle.py fails while the committed file is not what the script makes.

    code   = round_to_nearest_even(x * multiplier), saturated; value = code * scale
    128s   : multiplier = fp8_max / amax (cut to a power of two), scale = 1 / multiplier, f32
    MX 32s : scale = 2^ceil(log2(amax / fp8_max)) as an e8m0 byte, multiplier = 1 / scale
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "fp8_golden.safetensors"

FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
# (grouping, outer block, inner block)
BLOCKS = {"1x128": (1, 128), "128x128": (128, 128), "mx 1x32": (1, 32), "mx 32x32": (32, 32)}
LARGEST = {"f32": 3.4028234663852886e38, "bf16": 3.3895313892515355e38, "f16": 65504.0}
SHAPES = {"wide": (40, 136), "tall": (133, 40)}
# grouping, format, input dtype, shape, power of two
CASES = [
    ("1x128", "e4m3", "f32", "wide", True),
    ("1x128", "e4m3", "bf16", "tall", False),
    ("1x128", "e5m2", "f16", "wide", True),
    ("128x128", "e4m3", "bf16", "wide", True),
    ("128x128", "e4m3", "f32", "tall", False),
    ("128x128", "e5m2", "f16", "tall", True),
    ("mx 1x32", "e4m3", "bf16", "wide", True),
    ("mx 1x32", "e5m2", "f32", "tall", True),
    ("mx 32x32", "e4m3", "f16", "wide", True),
    ("mx 32x32", "e4m3", "f32", "tall", True),
]


def code_values(fmt: str) -> np.ndarray:
    """The finite non-negative values of a format, by code."""
    exponent_bits, mantissa_bits, codes = {"e4m3": (4, 3, 0x7F), "e5m2": (5, 2, 0x7C)}[fmt]
    bias = 2 ** (exponent_bits - 1) - 1
    code = np.arange(codes)
    exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
    fraction = mantissa / 2**mantissa_bits + (exponent > 0)
    return np.ldexp(fraction, np.maximum(exponent, 1) - bias)


def encode(x: np.ndarray, fmt: str) -> np.ndarray:
    """Nearest value, ties to the even code, saturating; NaN is 0x7f."""
    values = code_values(fmt)
    magnitude = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    below = above - 1
    with np.errstate(invalid="ignore"):
        distance = (magnitude - values[below]) - (values[above] - magnitude)
        up = (distance > 0) | ((distance == 0) & (above % 2 == 0))
    code = np.where(up, above, below).astype(np.uint8)
    code = code | np.where(np.signbit(x), 0x80, 0).astype(np.uint8)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def block_multiplier(block: np.ndarray, grouping: str, fmt: str, dtype: str, power_of_two: bool):
    """(multiplier, stored scale) of one block of f32 values."""
    finite_or_inf = np.abs(block[~np.isnan(block)])
    amax = np.float32(finite_or_inf.max(initial=0))
    with np.errstate(over="ignore", under="ignore"):
        if grouping.startswith("mx"):
            wanted = np.float32(amax * (np.float32(1) / np.float32(FP8_MAX[fmt])))
            if np.isinf(wanted):
                code = 254
            elif wanted <= 2.0**-127:
                code = 0
            else:
                mantissa, exponent = np.frexp(np.float64(wanted))  # wanted = mantissa * 2^exponent
                code = min(int(exponent) - (mantissa == 0.5) + 127, 254)
            return np.float32(2.0 ** (127 - code)), np.uint8(code)
        if amax == 0 or np.isinf(amax):
            return np.float32(1), np.float32(1)
        multiplier = np.float32(FP8_MAX[fmt]) / amax
        if np.isinf(multiplier):
            multiplier = np.float32(LARGEST[dtype])
        if power_of_two:
            multiplier = np.float32(2.0 ** (int(np.frexp(np.float64(multiplier))[1]) - 1))
        return multiplier, np.float32(1) / multiplier


def quantize(x: np.ndarray, grouping: str, fmt: str, dtype: str, power_of_two: bool):
    """Codes [outer, inner] and scales [blocks of outer, blocks of inner] (the compact layout)."""
    tall, wide = BLOCKS[grouping]
    outer, inner = x.shape
    codes = np.zeros(x.shape, np.uint8)
    kind = np.uint8 if grouping.startswith("mx") else np.float32
    scales = np.zeros((-(-outer // tall), -(-inner // wide)), kind)
    for o in range(scales.shape[0]):
        for i in range(scales.shape[1]):
            part = np.s_[o * tall : (o + 1) * tall, i * wide : (i + 1) * wide]
            multiplier, scales[o, i] = block_multiplier(x[part], grouping, fmt, dtype, power_of_two)
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                codes[part] = encode(x[part] * multiplier, fmt)
    return codes, scales


def gemm_scales(scales: np.ndarray, grouping: str) -> np.ndarray:
    """Compact to GEMM layout: 1x128 is transposed, rows are padded to a multiple of 4 with 1."""
    if grouping.startswith("mx"):
        return scales
    if grouping == "1x128":
        scales = scales.T
    padding = -scales.shape[1] % 4
    return np.ascontiguousarray(np.pad(scales, ((0, 0), (0, padding)), constant_values=1))


def to_dtype(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """(bits as stored, the rounded values in f32)"""
    if dtype == "f32":
        return x.view(np.uint32), x
    if dtype == "f16":
        with np.errstate(over="ignore", under="ignore"):
            half = x.astype(np.float16)
        return half.view(np.uint16), half.astype(np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded = np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
    return rounded, (rounded.astype(np.uint32) << 16).view(np.float32)


def inputs(shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Normal values whose tiles differ in magnitude; some tiles are zero, tiny, huge, inf or NaN."""
    rows, cols = shape
    rng = np.random.Generator(np.random.PCG64(rows * 1000 + cols))
    x = rng.standard_normal(shape)
    r, c = np.indices(shape)
    x = np.ldexp(x, (r // 32 * 7 + c // 32 * 3 + r % 3) % 19 - 9)
    tile, spot = (r // 8 * 5 + c // 32) % 16, (r * 31 + c * 17) % 29 == 0
    x[tile == 3] = 0
    tiny, huge = (2.0**-24, 60000.0) if dtype == "f16" else (2.0**-133, 3e38)
    x = np.where(tile == 5, np.copysign(tiny, x), x)
    x = np.where((tile == 7) & spot, np.copysign(huge, x), x)
    x = np.where((tile == 9) & spot, np.copysign(np.inf, x), x)
    x = np.where(((tile == 11) & spot) | (tile == 13), np.nan, x)
    return np.ascontiguousarray(x.astype(np.float32))


def golden() -> bytes:
    """The file: every input, and for every case both copies in the GEMM layout."""
    tensors: dict[str, np.ndarray] = {}
    cases = []
    for index, (grouping, fmt, dtype, shape, power_of_two) in enumerate(CASES):
        bits, x = to_dtype(inputs(SHAPES[shape], dtype), dtype)
        name = f"x.{shape}.{dtype}"
        tensors[name] = bits
        cases.append(
            {
                "x": name,
                "grouping": grouping,
                "format": fmt,
                "dtype": dtype,
                "power_of_two": power_of_two,
            }
        )
        for copy, values in (("rowwise", x), ("columnwise", np.ascontiguousarray(x.T))):
            codes, scales = quantize(values, grouping, fmt, dtype, power_of_two)
            tensors[f"{index}.{copy}.codes"] = codes
            tensors[f"{index}.{copy}.scales"] = gemm_scales(scales, grouping)
    header: dict[str, object] = {"__metadata__": {"cases": json.dumps(cases)}}
    names = {"uint8": "U8", "uint16": "U16", "uint32": "U32", "float32": "F32"}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": names[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(t.tobytes() for t in tensors.values())])


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_bytes(golden())
    sys.stdout.write(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes\n")
