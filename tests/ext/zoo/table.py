"""Writes the page of models: `python tests/ext/zoo/table.py > docs/models.md`.

`table.py bert t5` runs these model types only.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[n]) for n in (0, 1, 2)]

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from compare import NAMES, Outcome, outcome, outcome_of_parts  # noqa: E402
from engine_refusals import REFUSED  # noqa: E402
from families import FAMILIES, Family  # noqa: E402
from inputs import make_batches, make_model  # noqa: E402
from parts import COLUMNS, parts_of  # noqa: E402
from refusals import all_linear, in_order, part, says  # noqa: E402

ALL = "`all-linear`"

HEAD = """# Models: which families of Transformers work

It depends on how you train:

| You train with | Which models |
|---|---|
| [`mlora train`](#in-mlora-train), `Engine` | decoders with attention: Llama, Qwen, Mistral, Gemma, ... |
| [your own loop](#in-your-own-loop), `Trainer`, TRL | nearly all: text, images, audio |

A class that does not work is refused in one line that names it, before anything is trained. So you may try a
class that is not on this page.

"""

TRAINED = """## In `mlora train`

`mlora train` and `Engine` pack the rows of all samples behind each other. When a model is loaded, they check
that packed rows give the model's own logits. {taken} of {all} classes of decoders pass, tried as small models
with random weights. Classifiers and taggers over them work, too ([heads.md](heads.md)). These pass:

{names}.

These are refused:

| They have | Classes |
|---|---|
{refused}

LFM2 passes without its convolutions only; the checkpoints that are published have them. Encoders,
encoder-decoders and models of images or audio were not tried: train them in your own loop.
`tests/mlora/model/test_decoder_families.py` checks this list.

"""

LOOP = """## In your own loop

`convert_model` puts adapters on a model of your own, and a batch may mix them. {classes} classes were
compared with PEFT ([how](#how-it-was-checked)), with transformers {transformers}, peft {peft} and torch
{torch}:

{counts}

- **equal**: all outputs and gradients are those of PEFT with each adapter alone, to 1e-9.
- **refused in part**: some layers that `all-linear` reaches are refused, by a ValueError that names the layer
  and says what to do. Without them all results are equal. The last column of the classes' table says how to
  leave them out: `without` lists patterns for `exclude_modules`.
- **refused**: all layers of the column are refused so.
- **PEFT refuses**: PEFT cannot train such an adapter alone, either.
- A dash: the class has no such part.

| Column | What the adapters train |
|---|---|
| `all-linear` | the linear layers |
| embeddings | also LoRA on the table of tokens, and on the head that makes logits, if there is one |
| tokens | also 26 rows of the table of tokens: `trainable_token_indices` |
| head | also a copy of the head (`lm_head`, `classifier`, or what the class has): `modules_to_save` |
| norm | also a copy of the last norm that is used: `modules_to_save` |

Two families have limits of their own:

- **Qwen2-VL and Qwen2.5-VL** see the images of a batch as one list of patches. Adapters on these layers can
  be mixed if all images of the batch have one size and all samples have equally many. Other batches are
  refused.
- **NLLB-MoE**'s experts take a number of tokens that depends on the whole batch. So one sample's results
  depend on the others, whatever their adapters. Conversion warns of it. The model of its row has no such
  layer.

"""

GENERATE = """\
## Generation

105 of these classes have `generate`. For 100 of them, `generate` on a mixed batch continues each prompt as in
a batch of its own adapter (greedy search and two beams with a cache, greedy search without one). The other
five refuse, and name a reason:

- RWKV with its cache: the cache mixes samples.
- Llava, PaliGemma, Qwen2-VL and Qwen2.5-VL, if adapters sit on layers that process images: newer versions of
  Transformers call these layers before the first forward pass.

Whisper refuses several return sequences per sample. `tests/ext/zoo/test_zoo_generate.py` checks all of this.

"""

CLASSES = """## Classes

All classes in your own loop. The numbers stand for [reasons](#reasons).

"""

CHECKED = """## How it was checked

For each class the check did the following:

1. It made a small model with random weights, and added two adapters (ranks 4 and 12, `all-linear`).
2. It ran a mixed batch (`adapter_names=["a", "b", "__base__", "a"]`) in evaluation mode and in training mode,
   in fp64. One batch had sequences longer than its number of samples, another had sequences of exactly that
   length. The base model's dropouts, router noise and other random numbers were off.
3. It ran PEFT with each adapter alone on the same weights, and compared the outputs of every sample and the
   gradients of every adapter.

It did the same for adapters that train what the other columns say, on the targets of the first one.

- A name in `modules_to_save` stands for every module whose name ends so, such as `classifier` for
  DistilBERT's `pre_classifier`, and these have no low-rank parts.
- Batches for copies with batch normalisation have two samples of each adapter, which it needs, and none of
  the base.
- Where tokens are trained, PEFT leaves out the bias of a head that is tied to the table, until it has merged
  them (its [issue 3649](https://github.com/huggingface/peft/issues/3649)). The check adds this bias to PEFT's
  result.

This page is the output of `python tests/ext/zoo/table.py`. `make nightly` checks every row.
"""


def _run(family: Family) -> dict[str, Outcome]:
    """The outcome of each column."""
    model = make_model(family)
    batches = make_batches(family, model)
    found = {ALL: _or_wrong(lambda: outcome(model, batches, NAMES))}
    if found[ALL].verdict == "equal" and found[ALL].reasons:
        found[ALL].verdict = "refused in part"
    for column, own in parts_of(model, batches[0], found[ALL].targets).items():
        found[column] = _or_wrong(
            lambda own=own: outcome_of_parts(model, batches, own.names, own.configs, own.modules)
        )
    return found


def _or_wrong(compare: Callable[[], Outcome]) -> Outcome:
    try:
        return compare()
    except AssertionError as error:
        return Outcome(f"**WRONG**: {str(error).splitlines()[0]}", {"target_modules": "all-linear"}, [])


def _cell(family: Family, column: str, found: Outcome | None) -> str:
    """The verdict, with the numbers of its reasons."""
    if found is None:
        return "-"
    if not found.reasons:
        return found.verdict
    expected = all_linear(family.kind) if column == ALL else part(family.kind, column)[1]
    known = expected is not None and all(says(expected, reason) for reason in found.reasons)
    why = str(in_order().index(expected) + 1) if known and expected else f"**NEW**: {found.reasons[0]}"
    return f"{found.verdict} ({why})"


def _targets(found: Outcome) -> str:
    targets = found.targets.get("target_modules", "all-linear")
    parts = [] if targets == "all-linear" else ["on " + ", ".join(f"`{name}`" for name in targets)]
    if "exclude_modules" in found.targets:
        left_out = found.targets["exclude_modules"].split("|")
        parts.append("without " + ", ".join(f"`{name}`" for name in left_out))
    return "; ".join(parts)


def _counts(rows: list[dict[str, Outcome]]) -> str:
    """A table of how often each column has each verdict."""
    verdicts = ("equal", "refused in part", "refused", "PEFT refuses")
    lines = ["| Column | " + " | ".join(verdicts) + " | - |", "|---|" + "---|" * (len(verdicts) + 1)]
    for column in (ALL, *COLUMNS):
        own = [row[column].verdict if column in row else "-" for row in rows]
        lines.append(f"| {column} | " + " | ".join(str(own.count(one)) for one in (*verdicts, "-")) + " |")
    return "\n".join(lines)


def main(chosen: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    families = [family for family in FAMILIES if not chosen or family.model_type in chosen]
    rows, lines = [], []
    for family in families:
        start, found = time.monotonic(), _run(family)
        verdicts = ", ".join(f"{column} {one.verdict}" for column, one in found.items())
        print(f"{family.kind}: {verdicts}; {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        cells = [_cell(family, column, found.get(column)) for column in (ALL, *COLUMNS)]
        rows.append(found)
        row = (family.group, family.model_type, f"`{family.kind}`", *cells, _targets(found[ALL]))
        lines.append("| " + " | ".join(row) + " |")
    print(page(lines, _counts(rows)), end="")


def page(lines: list[str], counts: str) -> str:
    """Returns the page: what works first, then the table of `lines`, then how it was checked."""
    versions = {
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "torch": torch.__version__,
    }
    columns = ("Kind", "Model type", "Class", ALL, *COLUMNS, "Targets, if not all-linear")
    head = "| " + " | ".join(columns) + " |\n|" + "---|" * len(columns)
    reasons = (f"{number}. {one.reason}" for number, one in enumerate(in_order(), 1))
    return (
        HEAD
        + _trained()
        + LOOP.format(classes=len(lines), counts=counts, **versions)
        + GENERATE
        + CLASSES
        + "\n".join([head, *lines, "", "## Reasons", "", *reasons, "", CHECKED])
    )


def _trained() -> str:
    """The part on `mlora train`: which decoders it takes."""
    decoders = [family.kind for family in FAMILIES if family.group == "decoder"]
    left = {kind for kinds in REFUSED.values() for kind in kinds}
    taken = [kind for kind in decoders if kind not in left]
    refused = (f"| {reason} | {_names(kinds)} |" for reason, kinds in REFUSED.items())
    return TRAINED.format(
        taken=len(taken), all=len(decoders), names=_names(taken), refused="\n".join(refused)
    )


def _names(kinds: list[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


if __name__ == "__main__":
    main(sys.argv[1:])
