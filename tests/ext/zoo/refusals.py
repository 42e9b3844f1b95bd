"""What is refused by name, with the reason that the table gives; by column of the table."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Why some classes are refused.

    Attributes:
        message: what the error says.
        reason: for the table, in a line.
        kinds: the classes, by name.
    """

    message: str
    reason: str
    kinds: tuple[str, ...]


def _kinds(names: str) -> tuple[str, ...]:
    return tuple(names.split())


ALL_LINEAR = (
    Refusal(
        "Mamba's kernels",
        "Mamba's kernels read the weight of `out_proj` without calling the layer. PEFT refuses it, too.",
        _kinds("FalconH1ForCausalLM FalconMambaForCausalLM MambaForCausalLM Mamba2ForCausalLM"),
    ),
    Refusal(
        r"router is a (Llama4Router|PhimoeTopKRouter)",
        "The router is a linear layer that returns a tuple. PEFT fails on it, too.",
        _kinds("Llama4ForCausalLM PhimoeForCausalLM"),
    ),
    Refusal(
        "nn.MultiheadAttention reads its weight",
        "`nn.MultiheadAttention` reads the weight of `out_proj` without calling the layer. PEFT's adapter on "
        "it has no effect.",
        _kinds("SiglipForImageClassification SiglipModel PaliGemmaForConditionalGeneration"),
    ),
    Refusal(
        "several samples share them|positions that all samples share",
        "The layers also see positions, which all samples share: samples of two adapters would need two of "
        "them.",
        _kinds("SEWDForSequenceClassification Swinv2ForImageClassification"),
    ),
)
"""Layers that `all-linear` reaches."""

PARTS = {
    "norm": (
        Refusal(
            "positions that all samples share",
            "The last norm acts on positions, which all samples share.",
            _kinds("SEWDForSequenceClassification"),
        ),
    ),
}
"""Parts that PEFT trains."""

PEFT_REFUSES = {
    "tokens": (
        Refusal(
            "object has no attribute 'bias'",
            "The model reads the head's bias, which PEFT's wrapper lacks.",
            _kinds("MobileBertForMaskedLM"),
        ),
        Refusal(
            "`get_input_embeddings` not auto",
            "PEFT asks the model for its input embedding, and the model names none.",
            _kinds("FlavaModel"),
        ),
    ),
    "head": (
        Refusal(
            "No modules were targeted|All modules were excluded",
            "All linear layers of the class are in the head, so no layer is left for low-rank parts.",
            _kinds(
                """IBertForMaskedLM PoolFormerForImageClassification RegNetForImageClassification
                ResNetForImageClassification"""
            ),
        ),
    ),
}
"""Parts that PEFT cannot train in a class, either."""


def all_linear(kind: str) -> Refusal | None:
    """What is refused of a class's linear layers."""
    return next((one for one in ALL_LINEAR if kind in one.kinds), None)


def part(kind: str, column: str) -> tuple[str, Refusal | None]:
    """The verdict of a class's part, and why."""
    for verdict, refusals in {"refused": PARTS, "PEFT refuses": PEFT_REFUSES}.items():
        for one in refusals.get(column, ()):
            if kind in one.kinds:
                return verdict, one
    return "equal", None


def in_order() -> list[Refusal]:
    """All, as the table counts them."""
    columns = [ALL_LINEAR, *PARTS.values(), *PEFT_REFUSES.values()]
    return [one for column in columns for one in column]


def says(refusal: Refusal, message: str) -> bool:
    return re.search(refusal.message, message) is not None
