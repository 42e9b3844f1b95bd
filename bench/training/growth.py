"""How long a step of whole training takes as adapters and layers become more, with the same rows.

    python -m bench growth                # results/growth-cpu.{json,txt}
    python -m bench growth --threads 1 --out growth-one-thread

One batch of 256 samples of 16 tokens is shared evenly among 1, 8, 64 or 256 adapters of rank 8, dropout 0.1,
on 2 random blocks of TinyLlama-1.1B's sizes, bf16. A step is forward, backward, and every adapter's optimizer
step (`adamw_torch_fused`), by `Engine`. Then 1, 2 and 4 blocks with 8 adapters. `frozen` is the base's
decoder alone, forward and dX. Cases take turns; medians.
"""

from __future__ import annotations

import argparse

import torch
from mlora.cluster.allocators import keep_freed_memory
from mlora.engine.engine import Engine
from shared.harness import Found, measured, table
from shared.shapes import ModelShape, random_llama
from shared.timing import alternate, medians
from torch import nn

from training.together import Step, all_linear, together

ADAPTERS, BLOCKS = (1, 8, 64, 256), (1, 2, 4)
SAMPLES, TOKENS, VOCABULARY = 256, 16, 2048
SHAPE, QUICK_SHAPE = (2048, 5632, 32, 4), (64, 96, 4, 2)
COLUMNS = (
    ("passes", "passes", "8.1f", 1.0),
    ("optimizers", "optimizers", "8.1f", 1.0),
    ("step", "step", "8.1f", 1.0),
    ("to 8 adapters", "ratio", "8.3f", 1.0),
)


def model_of(blocks: int, quick: bool) -> nn.Module:
    """Returns a random Llama in bf16."""
    sizes = QUICK_SHAPE if quick else SHAPE
    return random_llama(ModelShape(*sizes, blocks, VOCABULARY)).to(torch.bfloat16)


def trained(blocks: int, adapters: int, quick: bool) -> Step:
    """Returns a step of so many adapters, which tells the seconds of each part."""
    engine = Engine(model_of(blocks, quick), dtype=torch.bfloat16)
    rows = torch.randint(VOCABULARY, (SAMPLES, TOKENS)).tolist()
    return together(engine, all_linear(8, dropout=0.1), [rows[i::adapters] for i in range(adapters)])


def frozen(blocks: int, quick: bool) -> Step:
    """Returns forward and dX of the base's decoder layers, of the same packed rows."""
    base = model_of(blocks, quick).requires_grad_(False)
    x = torch.randn(SAMPLES, TOKENS, base.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)

    def step() -> dict[str, float]:
        base.model(inputs_embeds=x).last_hidden_state.sum().backward()
        return {}

    return step


def measure(options: argparse.Namespace) -> Found:
    """Measures both tables, in milliseconds."""
    counts, quick = ADAPTERS[: 2 if options.quick else None], options.quick
    tables = {
        "adapters": {f"{n} adapters": trained(2, n, quick) for n in counts} | {"frozen": frozen(2, quick)},
        "blocks": {f"{n} blocks": trained(n, 8, quick) for n in BLOCKS},
    }
    results, lines = {}, [f"{SAMPLES * TOKENS} rows; median ms"]
    for name, cases in tables.items():
        rows = {}
        for case, row in medians(alternate(cases, options.turns)).items():
            step = row["seconds"]
            ms = {"passes": row.get("passes", step), "optimizers": row.get("optimizers", 0.0), "step": step}
            rows[case] = {part: 1e3 * seconds for part, seconds in ms.items()}
        results[name] = rows
        compared = rows.get("8 adapters", {}).get("step")
        shown = {
            case: row | {"ratio": row["step"] / compared if compared else None} for case, row in rows.items()
        }
        lines += ["", *table(shown, COLUMNS)]
    return Found({"ms": results}, lines)


def main() -> int:
    """Measures, prints, and writes the results."""
    keep_freed_memory()  # as `mlora train` does
    return measured(__doc__, measure, out="growth-cpu", turns=7)
