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
from parts import parts_of  # noqa: E402
from refusals import ALL_LINEAR, PARTS, PEFT_REFUSES, Refusal, all_linear, in_order, part, says  # noqa: E402

ALL = "`all-linear`"
LETTERS = {ALL: "L", "embeddings": "E", "tokens": "T", "head": "H", "norm": "N"}
"""The letter of each column."""
Row = tuple[Family, dict[str, Outcome]]
"""A class, and the outcome of each column that it has."""

HEAD = """# Models: which families of Transformers work

| You train with | Which models |
|---|---|
| [`mlora train`](#in-mlora-train), `Engine` | decoders with attention: Llama, Qwen, Mistral, Gemma, ... |
| [your own loop](#in-your-own-loop), `Trainer`, TRL | nearly all: text, images, audio |

A class that does not work is refused in one line that names it, before anything is trained. So you may
try a class that is not on this page.

Letters in the tables say what the adapters of a class may train in your own loop:

| Letter | The adapters train |
|---|---|
| L | linear layers: `all-linear` |
| E | LoRA on the table of tokens, and on the head that makes logits |
| T | rows of the table of tokens: `trainable_token_indices` |
| H | a copy of the head: `modules_to_save` of `lm_head`, `classifier`, or what the class has |
| N | a copy of the last norm: `modules_to_save` |

All outputs and gradients of a mixed batch are those of PEFT with each adapter alone, to 1e-9. A missing
letter: the class has no such part, or a [note](#notes) says why it is refused. Each number names a note.

"""

TRAINED = """## In `mlora train`

`mlora train` and `Engine` pack the rows of all samples behind each other. When a model is loaded, they
check that packed rows give the model's own logits. {taken} of {all} classes of decoders pass, tried as
small models with random weights. [Classifiers and taggers](adapters.md#heads) over them work, too. Train
other kinds of models in your own loop. `tests/mlora/model/test_decoder_families.py` checks this column.

"""

LOOP = """## In your own loop

`convert_model` puts adapters on a model of your own, and a batch may mix them. {classes} classes, the
decoders above among them, were [compared](#how-it-was-checked) with transformers {transformers}, peft
{peft} and torch {torch}:

{counts}

"""

LIMITS = """## Limits

- **LFM2** passes `mlora train` without its convolutions only; published checkpoints have them.
- **Qwen2-VL, Qwen2.5-VL** hold the images of a batch as one list of patches. Adapters on these layers can
  be mixed if all images of the batch have one size and all samples have equally many. Other batches are
  refused.
- **NLLB-MoE**'s sparse experts take a number of tokens that depends on the whole batch, so samples depend
  on each other. Conversion warns of it. The model of its row has no such layer.
- **`generate`** on a mixed batch continues each prompt as in a batch of its own adapter: 100 of the 105
  classes that have it (greedy search and two beams with a cache, greedy search without one). RWKV refuses
  with its cache, which mixes samples. Llava, PaliGemma, Qwen2-VL and Qwen2.5-VL refuse if adapters sit on
  layers that process images, since newer versions of Transformers call these before the first forward
  pass. Whisper refuses several return sequences per sample. `tests/ext/zoo/test_zoo_generate.py` checks
  this.

"""

CHECKED = """## How it was checked

1. A small model with random weights gets two adapters (ranks 4 and 12, `all-linear`).
2. It runs a mixed batch (`adapter_names=["a", "b", "__base__", "a"]`) in evaluation and in training mode,
   in fp64. One batch has sequences longer than its number of samples, another exactly that long. The
   base's own random numbers (dropouts, router noise) are off.
3. PEFT runs with each adapter alone on the same weights. Outputs of every sample and gradients of every
   adapter are compared.
4. The same for the other letters, on the targets of L.

- A name in `modules_to_save` stands for every module whose name ends so. These have no low-rank parts.
- Batches for copies with batch normalisation have two samples of each adapter, and none of the base.
- Where tokens are trained, PEFT leaves out the bias of a head that is tied to the table, until it has
  merged them ([issue 3649](https://github.com/huggingface/peft/issues/3649)). The check adds this bias to
  PEFT's result.

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


def _letters(family: Family, found: dict[str, Outcome]) -> str:
    """What the adapters of a class may train, with the numbers of the notes on what they may not."""
    letters, numbers = "", list[str]()
    for column, letter in LETTERS.items():
        one = found.get(column)
        if one is None:
            continue
        if one.verdict in ("equal", "refused in part"):
            letters += letter
        elif one.verdict not in ("refused", "PEFT refuses"):
            letters += one.verdict
        if one.reasons:
            expected = all_linear(family.kind) if column == ALL else part(family.kind, column)[1]
            known = expected is not None and all(says(expected, reason) for reason in one.reasons)
            why = str(in_order().index(expected) + 1) if known and expected else f"**NEW**: {one.reasons[0]}"
            numbers.append(why)
    return letters + (f" ({', '.join(numbers)})" if numbers else "")


def _left_out(rows: list[Row], reason: Refusal) -> str:
    """The patterns of `exclude_modules` without which the classes of a reason are equal."""
    kept = dict[str, list[str]]()
    for family, found in rows:
        if family.kind in reason.kinds and reason is all_linear(family.kind):
            patterns = found[ALL].targets.get("exclude_modules", "").split("|")
            kept.setdefault(" and ".join(f"`{one}`" for one in patterns if one), []).append(family.kind)
    if len(kept) == 1:
        return f" Leave out {next(iter(kept))}."
    return "".join(f" {', '.join(kinds)}: leave out {patterns}." for patterns, kinds in kept.items())


def _notes(rows: list[Row]) -> str:
    """The list of notes: what is refused, and why."""
    verdicts = {
        id(one): f"PEFT cannot train {LETTERS[column]}, either"
        for column, refusals in PEFT_REFUSES.items()
        for one in refusals
    }
    verdicts |= {
        id(one): f"{LETTERS[column]} is refused" for column, refusals in PARTS.items() for one in refusals
    }
    lines = [
        f"Notes 1 to {len(ALL_LINEAR)}: some layers of L are refused, by a ValueError that names the layer. "
        "Without them (`exclude_modules`) all results are equal.",
        "",
    ]
    for number, one in enumerate(in_order(), 1):
        verdict = f"{verdicts[id(one)]}. " if id(one) in verdicts else ""
        lines.append(f"{number}. {verdict}{one.reason}{_left_out(rows, one)}")
    letters = "abcd"
    lines += ["", "`mlora train` refuses decoders that have", ""]
    lines += [f"- ({letter}) {reason}" for letter, reason in zip(letters, REFUSED, strict=True)]
    return "\n".join(lines)


def _counts(rows: list[Row]) -> str:
    """A table of how often each letter has each verdict."""
    verdicts = ("equal", "refused in part", "refused", "PEFT refuses")
    lines = ["| | " + " | ".join(verdicts) + " | no such part |", "|---|" + "---|" * (len(verdicts) + 1)]
    for column, letter in LETTERS.items():
        own = [found[column].verdict if column in found else "-" for _, found in rows]
        lines.append(f"| {letter} | " + " | ".join(str(own.count(one)) for one in (*verdicts, "-")) + " |")
    return "\n".join(lines)


def main(chosen: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    families = [family for family in FAMILIES if not chosen or family.model_type in chosen]
    rows = list[Row]()
    for family in families:
        start, found = time.monotonic(), _run(family)
        verdicts = ", ".join(f"{column} {one.verdict}" for column, one in found.items())
        print(f"{family.kind}: {verdicts}; {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        rows.append((family, found))
    print(page(rows), end="")


def page(rows: list[Row]) -> str:
    """Returns the page: what the letters mean, decoders, other classes, notes, then how it was checked."""
    versions = {
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "torch": torch.__version__,
    }
    return (
        HEAD
        + _trained(rows)
        + LOOP.format(classes=len(rows), counts=_counts(rows), **versions)
        + _others(rows)
        + "## Notes\n\n"
        + _notes(rows)
        + "\n\n"
        + LIMITS
        + CHECKED
    )


def _trained(rows: list[Row]) -> str:
    """The part on `mlora train`: which decoders it takes."""
    decoders = [family.kind for family in FAMILIES if family.group == "decoder"]
    why = {kind: letter for letter, kinds in zip("abcd", REFUSED.values(), strict=True) for kind in kinds}
    lines = ["| Decoder | `mlora train` | own loop |", "|---|---|---|"]
    for family, found in rows:
        if family.group == "decoder":
            taken = f"no ({why[family.kind]})" if family.kind in why else "yes"
            lines.append(f"| `{family.kind}` | {taken} | {_letters(family, found)} |")
    return TRAINED.format(taken=len(decoders) - len(why), all=len(decoders)) + "\n".join(lines) + "\n\n"


def _others(rows: list[Row]) -> str:
    """A table for each other group of classes."""
    groups = dict[str, list[str]]()
    for family, found in rows:
        if family.group != "decoder":
            groups.setdefault(family.group, []).append(f"| `{family.kind}` | {_letters(family, found)} |")
    return "".join(
        f"### {group[0].upper()}{group[1:]}\n\n| Class | own loop |\n|---|---|\n" + "\n".join(lines) + "\n\n"
        for group, lines in groups.items()
    )


if __name__ == "__main__":
    main(sys.argv[1:])
