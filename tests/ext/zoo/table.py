"""Writes the page of models: `python tests/ext/zoo/table.py > docs/models.md`.

`table.py bert t5` runs these model types only.
"""

import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[n]) for n in (0, 1, 2)]

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from compare import NAMES, Outcome, outcome  # noqa: E402
from families import FAMILIES, Family  # noqa: E402
from inputs import make_batches, make_model  # noqa: E402

HEAD = """# Models: which families of Transformers work

This page shows the model classes of Transformers that take several adapters in one batch. For each class the
check did the following:

1. It made a small model with random weights, and added two adapters (ranks 4 and 12, `all-linear`).
2. It ran a mixed batch (`adapter_names=["a", "b", "__base__", "a"]`) in evaluation mode and in training mode,
   in fp64. One batch had sequences longer than its number of samples, another had sequences of exactly that
   length. The base model's dropouts, router noise and other random numbers were off.
3. It ran PEFT with each adapter alone on the same weights, and compared the outputs of every sample and the
   gradients of every adapter.

**Equal** means that all outputs and gradients agree to 1e-9. **Refused in part** means that `all-linear`
reaches a layer that mlora_ext cannot serve. A ValueError names the layer and says what to do. Without such
layers all results are equal. For these classes the last column shows targets that work: `on` lists
`target_modules`, `without` lists patterns of `exclude_modules`.

"""


GENERATE = """\
## Generation

105 of these classes have `generate`. For 99 of them, `generate` on a mixed batch continues each prompt as in
a batch of its own adapter (greedy search and two beams with a cache, greedy search without one). The other
six refuse, and name a reason:

- `switch_transformers`: its experts.
- RWKV with its cache: the cache mixes samples.
- Llava, PaliGemma, Qwen2-VL and Qwen2.5-VL, if adapters sit on layers that process images: newer versions of
  Transformers call these layers before the first forward pass.

Whisper refuses several return sequences per sample. `tests/ext/zoo/test_zoo_generate.py` checks all of this.

## Classes
"""


def _run(family: Family) -> Outcome:
    try:
        model = make_model(family)
        return outcome(model, make_batches(family, model), NAMES)
    except AssertionError as error:
        return Outcome(f"**WRONG**: {str(error).splitlines()[0]}", {}, [])


def _targets(found: Outcome) -> str:
    targets = found.targets.get("target_modules", "all-linear")
    parts = [] if targets == "all-linear" else ["on " + ", ".join(f"`{name}`" for name in targets)]
    if "exclude_modules" in found.targets:
        left_out = found.targets["exclude_modules"].split("|")
        parts.append("without " + ", ".join(f"`{name}`" for name in left_out))
    return "; ".join(parts)


def main(chosen: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    families = [family for family in FAMILIES if not chosen or family.model_type in chosen]
    lines = []
    for family in families:
        start, found = time.monotonic(), _run(family)
        print(f"{family.kind}: {found.verdict} {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        verdict = "refused in part" if found.verdict == "equal" and found.reasons else found.verdict
        row = (family.group, family.model_type, f"`{family.kind}`", verdict, _targets(found))
        lines.append((verdict, "| " + " | ".join(row) + " |"))
    whole, part = (sum(verdict == kind for verdict, _ in lines) for kind in ("equal", "refused in part"))
    print(HEAD, end="")
    print(
        f"Of {len(lines)} classes {whole} are equal and {part} refused in part, with transformers "
        f"{transformers.__version__}, peft {peft.__version__} and torch {torch.__version__}.\n"
        "This page is the output of `python tests/ext/zoo/table.py`; `make nightly` checks every row.\n"
    )
    print(GENERATE)
    print("| Kind | Model type | Class | Outcome | Targets, if not all-linear |\n|---|---|---|---|---|")
    print("\n".join(line for _, line in lines))


if __name__ == "__main__":
    main(sys.argv[1:])
