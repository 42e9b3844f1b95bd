"""Decoders of Transformers: packed rows give their logits, or `Engine` refuses them by name."""

import re
import sys
from pathlib import Path

import pytest
from mlora.engine.engine import Engine

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "ext" / "zoo"), str(ROOT / "tests" / "ext"), str(ROOT / "tests")]

from engine_refusals import REFUSED, SAYS  # noqa: E402
from families import FAMILIES, Family  # noqa: E402
from inputs import make_model  # noqa: E402

REASON = {kind: reason for reason, kinds in REFUSED.items() for kind in kinds}
QUICK = {
    "Gemma3ForCausalLM",
    "MambaForCausalLM",
    "OlmoeForCausalLM",
    "StableLmForCausalLM",
    "XGLMForCausalLM",
}
DECODERS = [family for family in FAMILIES if family.group == "decoder"]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, id=one.kind, marks=() if one.kind in QUICK else pytest.mark.nightly)
        for one in DECODERS
    ],
)
def test_a_decoder_is_taken_or_refused_by_name(family: Family) -> None:
    model = make_model(family).float()
    if family.kind not in REASON:
        Engine(model)
        return
    with pytest.raises(ValueError, match=SAYS[REASON[family.kind]]) as error:
        Engine(model)
    assert family.kind in str(error.value)


def test_the_page_of_models_says_of_each_decoder_whether_it_is_taken() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    part = page.partition("## In `mlora train`")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \| (yes|no \([a-d]\)) \|", part, re.MULTILINE)
    why = dict(zip(REFUSED, "abcd", strict=True))
    expected = [
        (family.kind, f"no ({why[REASON[family.kind]]})" if family.kind in REASON else "yes")
        for family in DECODERS
    ]
    assert named == expected
    assert all(f"- ({letter}) {reason}\n" in page for reason, letter in why.items())
    assert f"{len(DECODERS) - len(REASON)} of {len(DECODERS)}" in part
