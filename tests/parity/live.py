#!/usr/bin/env python3
"""The checks behind tests/parity/run: rowshard against stock transformers and peft, on one machine.

Both sides read the same directories and token files. transformers computes in float32 with the
bfloat16 weights, sample by sample; rowshard packs samples, so leakage between them would show.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import peft
import torch
import torch.nn.functional as F
import transformers
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

Tensor = torch.Tensor
Sample = tuple[Tensor, Tensor]  # ids, labels (not shifted)

ROOT = Path(__file__).resolve().parents[2]
IGNORE = -100
LOSS_BOUND = 1e-3  # nats a token
BLOCK_BOUND = 2e-2  # relative
TIE = 1e-3  # logits this close may come out in either order


class BadInput(Exception):
    """One line for the user; exit code 2."""


@dataclass
class Case:
    name: str
    model: Path
    data: Path
    adapter: Path | None
    device: str


@dataclass
class Report:
    log: Path
    lines: list[str] = field(default_factory=list)
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.lines.append(text)
        self.log.write_text("\n".join(self.lines) + "\n", encoding="utf-8")

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.note(text)

    def row(self, case: str, check: str, measured: str, passed: bool) -> None:
        self.rows.append((case, check, measured, "PASS" if passed else "FAIL"))
        self.say(f"{self.rows[-1][3]}  {case}: {check}: {measured}")

    def within(self, case: str, check: str, ours: float, stock: float, bound: float) -> None:
        measured = f"{ours:.6f} against {stock:.6f}, |difference| {abs(ours - stock):.2e}"
        self.row(case, check, f"{measured}, bound {bound:.2e}", abs(ours - stock) <= bound)

    def close(self) -> int:
        widths = [max(len(row[i]) for row in self.rows) for i in range(3)]
        self.say("")
        for row in self.rows:
            cells = [row[i].ljust(widths[i]) for i in range(3)]
            self.say("  ".join([*cells, row[3]]))
        failed = sum(row[3] == "FAIL" for row in self.rows)
        self.say(f"{'FAIL' if failed else 'PASS'}: {len(self.rows) - failed} of {len(self.rows)}")
        self.say(f"log: {self.log}")
        return 1 if failed else 0


class Program:
    """The rowshard binary; every command and what it said goes to the log."""

    def __init__(self, path: Path, report: Report) -> None:
        self.path, self.report = path, report

    def __call__(self, *arguments: str | Path) -> str:
        command = [str(self.path), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.report.note(f"$ {shlex.join(command)}\n{done.stdout}{done.stderr}".rstrip())
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            raise RuntimeError(f"{arguments[0]} ended with {done.returncode}: {last}")
        return done.stdout

    def json(self, *arguments: str | Path) -> dict[str, Any]:
        return json.loads(self(*arguments, "--json").strip().splitlines()[-1])


# ---- token files ------------------------------------------------------------------------------


def read_samples(path: Path) -> list[Sample]:
    tensors = load_file(path)
    offsets = tensors["sample_offsets"].tolist()
    pairs = zip(offsets[:-1], offsets[1:])
    return [(tensors["input_ids"][b:e].long(), tensors["labels"][b:e].long()) for b, e in pairs]


def trained(samples: list[Sample]) -> int:
    return sum(int((labels[1:] != IGNORE).sum()) for _, labels in samples)


def total(samples: list[Sample]) -> int:
    return sum(len(ids) for ids, _ in samples)


def take(samples: list[Sample], tokens: int, longest: int) -> list[Sample]:
    """The first samples that both programs use and that fit into `tokens`."""
    taken: list[Sample] = []
    for sample in samples:
        usable = 2 <= len(sample[0]) <= longest and trained([sample]) > 0
        if usable and total(taken) + len(sample[0]) <= tokens:
            taken.append(sample)
    if not taken:
        raise BadInput(f"no sample has a trained token and at most {min(tokens, longest)} tokens")
    return taken


def write_samples(samples: list[Sample], path: Path) -> Path:
    offsets = [0]
    for ids, _ in samples:
        offsets.append(offsets[-1] + len(ids))
    tensors = {
        "input_ids": torch.cat([ids for ids, _ in samples]).int(),
        "labels": torch.cat([labels for _, labels in samples]).int(),
        "sample_offsets": torch.tensor(offsets, dtype=torch.int64),
    }
    save_file(tensors, path, metadata={"format": "rowshard.tokens", "version": "1"})
    return path


# ---- the stock side ---------------------------------------------------------------------------


def torch_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def keys_of(info: Any, name: str) -> list[str]:
    found = info.get(name) if isinstance(info, dict) else getattr(info, name, None)
    return list(found or [])


def load_base(directory: Path) -> torch.nn.Module:
    """float32, holding the bfloat16 weights that --recipe bf16 computes with."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    for name in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := keys_of(info, name):
            raise BadInput(f"{directory}: transformers reports {name}: {keys}")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model.float().eval().to(torch_device())


@torch.no_grad()
def mean_loss(model: torch.nn.Module, samples: list[Sample]) -> float:
    losses = []
    for ids, labels in samples:
        logits = model(input_ids=ids[None].to(torch_device()), use_cache=False).logits[0]
        kept = (labels[1:] != IGNORE).to(logits.device)
        targets = labels[1:].to(logits.device)[kept]
        losses.append(F.cross_entropy(logits[:-1][kept].double(), targets, reduction="sum").item())
    return sum(losses) / trained(samples)


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> tuple[list[int], list[Tensor]]:
    """Ids after the prompt up to an end-of-sequence id of config.json, and the logits of each."""
    ends = model.config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    ids, logits = list(prompt), []
    while len(logits) < count:
        row = model(input_ids=torch.tensor([ids], device=torch_device()), use_cache=False)
        logits.append(row.logits[0, -1].float().cpu())
        token = int(logits[-1].argmax())
        if token in ends:
            break
        ids.append(token)
    return ids[len(prompt) :], logits


# ---- checks -----------------------------------------------------------------------------------


def check_adapter_loads(report: Report, case: Case, adapter: Path, what: str) -> None:
    """Stock peft on stock transformers: no key missing or left over, every value taken."""
    base = load_base(case.model)
    model = PeftModel.from_pretrained(base, str(adapter))
    result = model.load_adapter(str(adapter), adapter_name="again")
    missing = [key for key in keys_of(result, "missing_keys") if "lora_" in key]
    unexpected = keys_of(result, "unexpected_keys")
    report.row(
        case.name,
        f"{what} in stock peft",
        f"{len(missing)} keys missing, {len(unexpected)} unexpected",
        not missing and not unexpected,
    )
    stored = load_file(adapter / "adapter_model.safetensors")
    loaded = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    different = sorted(set(stored) ^ set(loaded))
    shared = set(stored) & set(loaded)
    values = [key for key in shared if not torch.equal(stored[key].float(), loaded[key].cpu())]
    report.row(
        case.name,
        f"{what}: keys and values as peft holds them",
        f"{len(stored)} tensors, {len(different)} key differences, {len(values)} other values",
        bool(stored) and not different and not values,
    )


def first_metrics(directory: Path) -> dict[str, Any]:
    with (directory / "metrics.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            metrics = json.loads(line)
            if "loss" in metrics:
                return metrics
    raise RuntimeError(f"{directory}: no step in metrics.jsonl")


def finetune(program: Program, case: Case, data: Path, tokens: int, recipe: str, out: Path) -> Any:
    """One step whose global batch is the whole file: it fits into one packed sequence."""
    program(
        "finetune", "--model", case.model, "--data", data, "--output-dir", out,
        "--recipe", recipe, "--device", case.device, "--max-steps", "1", "--seq-len", str(tokens),
        "--micro-batch-size", "1", "--grad-accum", "1", "--packing", "true",
        "--lora-r", "8", "--lora-alpha", "16", "--lr", "0.01", "--lr-schedule", "constant",
        "--target-modules", "all-linear", "--seed", "7",
    )  # fmt: skip
    return first_metrics(out)


def check_first_step(
    report: Report, program: Program, case: Case, samples: list[Sample], scratch: Path
) -> Path:
    batch = take(samples, min(512, longest_sample(case.model)), longest_sample(case.model))
    data = write_samples(batch, scratch / "step.safetensors")
    stock = mean_loss(load_base(case.model), batch)
    for recipe, bound in [("bf16", LOSS_BOUND), ("block", BLOCK_BOUND * stock)]:
        metrics = finetune(program, case, data, total(batch), recipe, scratch / recipe)
        report.within(case.name, f"first step, {recipe}", metrics["loss"], stock, bound)
        report.row(
            case.name,
            f"first step, {recipe}: tokens",
            f"{metrics['tokens']} against {trained(batch)}",
            metrics["tokens"] == trained(batch),
        )
    return scratch / "bf16" / "adapter"


def check_losses(
    report: Report,
    program: Program,
    case: Case,
    samples: list[Sample],
    adapters: list[tuple[str, Path]],
    scratch: Path,
) -> None:
    data = write_samples(samples, scratch / "evaluate.safetensors")
    common = ["--model", case.model, "--data", data, "--recipe", "bf16", "--device", case.device]
    longest = str(longest_sample(case.model))
    base = load_base(case.model)
    base_loss = mean_loss(base, samples)
    ours = program.json("evaluate", *common, "--seq-len", longest)
    report.within(case.name, "loss of the base", ours["loss"], base_loss, LOSS_BOUND)
    report.row(
        case.name,
        "tokens compared",
        f"{ours['tokens']} against {trained(samples)}",
        ours["tokens"] == trained(samples),
    )
    for what, adapter in adapters:
        model = PeftModel.from_pretrained(load_base(case.model), str(adapter)).eval()
        stock = mean_loss(model, samples)
        ours = program.json("evaluate", *common, "--seq-len", longest, "--adapter", adapter)
        report.within(case.name, f"loss with the {what}", ours["loss"], stock, LOSS_BOUND)
        report.row(
            case.name,
            f"the {what} matters",
            f"moves the loss by {stock - base_loss:+.4f}",
            abs(stock - base_loss) > 2 * LOSS_BOUND,
        )


def check_greedy(
    report: Report,
    program: Program,
    case: Case,
    samples: list[Sample],
    adapter: Path | None,
    count: int,
) -> None:
    ids, labels = samples[0]
    length = max(1, int((labels != IGNORE).nonzero()[0]))  # up to the first trained token
    prompt = ids[:length].tolist()
    model = load_base(case.model)
    extra: list[str | Path] = []
    if adapter:
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
        extra = ["--adapter", adapter]
    stock, logits = greedy(model, prompt, count)
    ours = program.json(
        "generate", "--model", case.model, *extra, "--prompt-ids", ",".join(map(str, prompt)),
        "--max-new-tokens", str(count), "--recipe", "bf16", "--device", case.device,
    )["ids"]  # fmt: skip
    check = f"greedy tokens, {'adapter' if adapter else 'base'}"
    same = next((i for i, (a, b) in enumerate(zip(ours, stock)) if a != b), None)
    if same is None and len(ours) == len(stock):
        report.row(case.name, check, f"{len(ours)} tokens equal", True)
        return
    # Where the two part, the best two logits must be as good as equal; what follows then differs.
    at = same if same is not None else min(len(ours), len(stock))
    row = logits[at]
    best = row.topk(2)
    gap = float(best.values[0] - best.values[1])
    other = ours[at] if at < len(ours) else None  # None: it ended there
    is_tie = gap < TIE and (other is None or other in best.indices.tolist())
    report.row(case.name, check, f"part at token {at}, best two logits {gap:.2e} apart", is_tie)


def longest_sample(model: Path) -> int:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return min(config["max_position_embeddings"], 1024)


# ---- quantised checkpoints --------------------------------------------------------------------


def tensors_of(directory: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(directory.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():
                yield key, file.get_tensor(key)


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """The scale of every element: 128 x 128 blocks, the last ones partial."""
    wide = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return wide[: shape[0], : shape[1]]


def dequantized(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.float() * spread(scales, codes.shape)


def check_codes(report: Report, case: str, source: Path, made: Path) -> None:
    """Every quantised weight is its source to within half a step of e4m3; the rest is unchanged."""
    before, after = dict(tensors_of(source)), dict(tensors_of(made))
    worst, quantised, changed = 0.0, 0, []
    for key, original in before.items():
        scales = after.get(f"{key}_scale_inv")
        if scales is None:
            if key not in after or not torch.equal(after[key], original):
                changed.append(key)
            continue
        quantised += 1
        grid = tuple(-(-n // 128) for n in original.shape)
        if tuple(scales.shape) != grid or after[key].dtype != torch.float8_e4m3fn:
            changed.append(key)
            continue
        w = original.float()
        # Half a step: 2^-4 of the value, or 2^-10 of the scale among the subnormals.
        half = torch.maximum(w.abs() * 2**-4, spread(scales, w.shape) * 2**-10)
        worst = max(worst, ((dequantized(after[key], scales) - w).abs() / half).max().item())
    extra = set(after) - set(before) - {f"{key}_scale_inv" for key in before}
    report.row(
        case,
        "quantize: codes against the source",
        f"{quantised} weights, worst error {worst:.3f} half steps, "
        f"{len(changed)} wrong tensors, {len(extra)} unknown",
        quantised > 0 and worst <= 1 + 1e-6 and not changed and not extra,
    )


def write_square_model(directory: Path) -> None:
    """A model all of whose linear sizes are multiples of 128."""
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=320, max_position_embeddings=256,
        tie_word_embeddings=False, initializer_range=0.05,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(directory)


def check_stock_dequantisation(report: Report, program: Program, scratch: Path) -> None:
    """transformers' own fine-grained FP8 loader, which dequantises where it sees no GPU.

    It takes the block size from rows / scale rows, so it is right for whole blocks only; models
    with partial blocks are compared by the explicit dequantisation of check_codes instead.
    """
    source, made = scratch / "square", scratch / "square-fp8"
    write_square_model(source)
    program("quantize", "--model", source, "--output-dir", made)
    check_codes(report, "square", source, made)
    loaded = scratch / "stock.safetensors"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, "--dequantize", str(made), "--into", str(loaded)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    report.note(f"$ {shlex.join(command)}\n{done.stdout}{done.stderr}".rstrip())
    check = "quantize: stock transformers' fine-grained FP8"
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        report.row("square", check, f"does not load: {last}", False)
        return
    stock, after = load_file(loaded), dict(tensors_of(made))
    weights = [key for key in after if f"{key}_scale_inv" in after]
    def differs(key: str) -> bool:
        ours = dequantized(after[key], after[f"{key}_scale_inv"]).bfloat16()
        return key not in stock or not torch.equal(stock[key].float(), ours.float())

    wrong = [key for key in weights if differs(key)]
    measured = f"{len(weights)} weights dequantised by its loader, {len(wrong)} with other bits"
    report.row("square", check, measured, bool(weights) and not wrong)


# ---- tensor parallelism ------------------------------------------------------------------------


def split_run(
    report: Report, program: Program, ranks: int, model: Path, data: Path, device: str, out: Path
) -> list[float]:
    """Ten steps over `ranks` tensor-parallel ranks, which may share a GPU; its losses."""
    options = [
        "finetune", "--model", model, "--data", data, "--output-dir", out, "--recipe", "bf16",
        "--device", device, "--transport", "staged", "--tp", str(ranks), "--max-steps", "10",
        "--seq-len", "576", "--packing", "true", "--micro-batch-size", "1", "--grad-accum", "2",
        "--lora-r", "8", "--lora-alpha", "16", "--lora-dropout", "0.1", "--lr", "0.0001",
        "--target-modules", "all-linear", "--seed", "7",
    ]  # fmt: skip
    if ranks == 1:
        program(*options)
    else:
        quiet = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMPI_MCA_hwloc_base_binding_policy": "none",
        }
        os.environ.update(quiet)
        Program(Path("mpirun"), report)("-np", str(ranks), str(program.path), *options)
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [metrics["loss"] for metrics in map(json.loads, lines) if "loss" in metrics]


@torch.no_grad()
def check_tensor_parallel(report: Report, program: Program, device: str, scratch: Path) -> None:
    """An adapter trained over two tensor-parallel ranks is one that stock peft takes, and it is
    the adapter that one rank trains."""
    name, model = "tp 2", scratch / "split"
    torch.manual_seed(12)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=640, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, vocab_size=320, max_position_embeddings=576,
        tie_word_embeddings=False, initializer_range=0.05,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(model)
    samples = []
    for number in range(120):  # 7,000 tokens of something to learn
        length = 24 + number * 7 % 71
        ids = (torch.arange(length) * (1 + number % 3) + 5 * number) % config.vocab_size
        labels = ids.clone()
        labels[:3] = IGNORE
        samples.append((ids, labels))
    data = write_samples(samples, scratch / "data.safetensors")
    losses = {
        ranks: split_run(report, program, ranks, model, data, device, scratch / f"tp{ranks}")
        for ranks in (1, 2)
    }
    apart = max(abs(a - b) / b for a, b in zip(losses[2], losses[1]))
    measured = f"{len(losses[2])} steps, at most {apart:.2e} apart, bound {LOSS_BOUND:.2e}"
    report.row(name, "losses against one rank's", measured, apart <= LOSS_BOUND)

    case = Case(name, model, data, None, device)
    adapters = {ranks: scratch / f"tp{ranks}" / "adapter" for ranks in (1, 2)}
    check_adapter_loads(report, case, adapters[2], "adapter of two ranks")
    files = {ranks: load_file(at / "adapter_model.safetensors") for ranks, at in adapters.items()}
    same_keys = files[1].keys() == files[2].keys()
    flats = {r: torch.cat([file[k].double().flatten() for k in sorted(file)])
             for r, file in files.items()}  # fmt: skip
    distance = float((flats[2] - flats[1]).norm() / flats[1].norm()) if same_keys else float("inf")
    measured = f"{len(files[2])} factors, {distance:.2e} of its length apart, bound 1e-3"
    report.row(name, "adapter against one rank's", measured, same_keys and distance <= 1e-3)

    logits = {0: load_base(model)}
    for ranks, at in adapters.items():
        logits[ranks] = PeftModel.from_pretrained(load_base(model), str(at)).eval()
    ids = samples[-1][0][None].to(torch_device())
    logits = {r: m(input_ids=ids, use_cache=False).logits.double() for r, m in logits.items()}
    moved = float((logits[1] - logits[0]).norm())
    apart = float((logits[2] - logits[1]).norm()) / float(logits[1].norm())
    trained_by = moved / float(logits[1].norm())
    measured = f"{apart:.2e} of their length apart, bound 1e-3; training moved it {trained_by:.2e}"
    good = apart <= min(1e-3, trained_by / 5)
    report.row(name, "logits by stock peft against one rank's", measured, good)
    stock = mean_loss(PeftModel.from_pretrained(load_base(model), str(adapters[2])).eval(), samples)
    ours = program.json(
        "evaluate", "--model", model, "--data", data, "--recipe", "bf16", "--device", device,
        "--adapter", adapters[2], "--seq-len", "576",
    )  # fmt: skip
    # bf16 activations alone cost more than 1e-3 of so small a model.
    bound = LOSS_BOUND if device == "host" else 1e-2
    report.within(name, "loss with the adapter of two ranks", ours["loss"], stock, bound)


def dequantize_with_stock(directory: Path, into: Path) -> int:
    """In a process of its own, without a GPU."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    for name in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := keys_of(info, name):
            print(f"{name}: {keys}", file=sys.stderr)
            return 1
    state = {key: value.detach().clone().contiguous() for key, value in model.state_dict().items()}
    save_file(state, into)
    return 0


@torch.no_grad()
def check_quantized_model(
    report: Report, program: Program, case: Case, samples: list[Sample], scratch: Path
) -> None:
    made = scratch / "fp8"
    program("quantize", "--model", case.model, "--output-dir", made)
    check_codes(report, case.name, case.model, made)
    data = scratch / "evaluate.safetensors"
    common = ["--data", data, "--device", case.device, "--seq-len", str(longest_sample(case.model))]
    from_file = program.json("evaluate", "--model", made, *common)
    in_memory = program.json("evaluate", "--model", case.model, "--recipe", "block", *common)
    report.row(
        case.name,
        "quantize: same loss as quantising in memory",
        f"{from_file['loss']!r} and {in_memory['loss']!r}",
        from_file["loss"] == in_memory["loss"],
    )
    model = load_base(case.model)
    parameters = dict(model.named_parameters())
    after = dict(tensors_of(made))
    for key, scales in after.items():
        if key.endswith("_scale_inv"):
            weight = key.removesuffix("_scale_inv")
            parameters[weight].copy_(dequantized(after[weight], scales))
    stock = mean_loss(model, samples)
    check = "loss in FP8 against transformers on the dequantised weights"
    report.within(case.name, check, from_file["loss"], stock, BLOCK_BOUND * stock)


# ---- the run ----------------------------------------------------------------------------------


def run_case(report: Report, program: Program, case: Case, arguments: Any) -> None:
    report.say(f"{case.name}: {case.model}")
    with tempfile.TemporaryDirectory(prefix="rowshard-parity-") as folder:
        scratch = Path(folder)
        longest = longest_sample(case.model)
        everything = read_samples(case.data)
        samples = take(everything, max(arguments.max_tokens, longest), longest)

        def first_step() -> None:
            adapter = check_first_step(report, program, case, everything, scratch)
            adapters.append(("adapter trained for a step", adapter))

        adapters: list[tuple[str, Path]] = []
        if case.adapter:
            adapters.append(("given adapter", case.adapter))
        steps: list[tuple[str, Any]] = [
            ("first step", first_step),
            (
                "adapter in stock peft",
                lambda: [check_adapter_loads(report, case, a, what) for what, a in adapters],
            ),
            (
                "losses",
                lambda: check_losses(report, program, case, samples, adapters, scratch),
            ),
            (
                "greedy tokens",
                lambda: [
                    check_greedy(report, program, case, samples, a, arguments.new_tokens)
                    for a in [None, *(a for _, a in adapters[:1])]
                ],
            ),
            (
                "quantize",
                lambda: check_quantized_model(report, program, case, samples, scratch),
            ),
        ]
        for name, step in steps:
            attempt(report, case.name, name, step)


def attempt(report: Report, case: str, name: str, step: Any) -> None:
    """A check that cannot run is a failed check; the others still run."""
    try:
        step()
    except Exception as error:  # noqa: BLE001
        text = str(error).strip().splitlines() or [repr(error)]
        report.row(case, name, f"{type(error).__name__}: {text[0]}", False)


def cases(arguments: Any) -> list[Case]:
    if arguments.model:
        if not arguments.data:
            raise BadInput("--model needs --data, a token file made with that model's tokenizer")
        model, data, adapter = arguments.model, arguments.data, arguments.adapter
        return [Case(model.resolve().name, model, data, adapter, arguments.device)]
    if arguments.adapter or arguments.data:
        raise BadInput("--adapter and --data need --model")
    golden = ROOT / "tests" / "parity" / "golden"
    found = [
        # So small that bf16 activations alone cost more than the bound: always on the host.
        Case(at.name, at, at / "tokens.safetensors", at / "adapter", "host")
        for at in (golden / name for name in ("llama", "qwen2", "qwen3"))
    ]
    quickstart = ROOT / "out" / "quickstart"
    model, data = quickstart / "base", quickstart / "data" / "eval.safetensors"
    if (model / "config.json").exists() and data.exists():
        adapter = quickstart / "run" / "adapter"
        found.append(
            Case("quickstart", model, data, adapter if adapter.exists() else None, arguments.device)
        )
    return found


def check_paths(all_cases: list[Case], program: Path) -> None:
    for case in all_cases:
        needed = [case.model / "config.json", case.data]
        if case.adapter:
            needed.append(case.adapter / "adapter_model.safetensors")
        for path in needed:
            if not path.is_file():
                raise BadInput(f"{path}: no such file")
        config = json.loads((case.model / "config.json").read_text(encoding="utf-8"))
        if config.get("quantization_config"):
            raise BadInput(f"{case.model} is quantised; give the bf16 model")
    if not os.access(program, os.X_OK):
        raise BadInput(f"{program}: no such program; run launch/build, or give --rowshard PATH")


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rowshard", type=Path, default=ROOT / "build" / "release" / "rowshard")
    parser.add_argument("--device", choices=["auto", "host", "cuda"], default="host")
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--log", type=Path, default=ROOT / "out" / "parity" / "parity.log")
    parser.add_argument("--only", default="")
    parser.add_argument("--dequantize", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dequantize:
        return dequantize_with_stock(arguments.dequantize, arguments.into)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        all_cases = cases(arguments)
        check_paths(all_cases, arguments.rowshard)
        arguments.log.parent.mkdir(parents=True, exist_ok=True)
        report = Report(arguments.log)
        program = Program(arguments.rowshard.resolve(), report)
        report.say(
            f"torch {torch.__version__} on {torch_device()}, transformers "
            f"{transformers.__version__}, peft {peft.__version__}; {program('--version').strip()}"
        )
        for case in all_cases:
            if arguments.only in ("", case.name):
                run_case(report, program, case, arguments)
        device = "host" if arguments.device == "auto" else arguments.device
        last: list[tuple[str, str, Any]] = [
            ("square", "quantize", lambda at: check_stock_dequantisation(report, program, at)),
            ("tp", "adapter", lambda at: check_tensor_parallel(report, program, device, at)),
        ]
        for name, what, check in last:
            if arguments.only in ("", name):
                with tempfile.TemporaryDirectory(prefix="rowshard-parity-") as folder:
                    attempt(report, name, what, lambda: check(Path(folder)))  # noqa: B023
        if not report.rows:
            raise BadInput(f"--only {arguments.only}: no such case")
    except (BadInput, OSError) as error:
        print(f"parity: error: {error}", file=sys.stderr)
        return 2
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
