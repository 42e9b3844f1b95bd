"""Regular expressions of a LoraConfig that backtrack: refused in seconds, in every field that has them."""

import time
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

from mlora_ext import add_adapter, convert_model
from mlora_ext.targets import refuse

SLOW = r"(([a-z._]+)+)+\d\d\d"


class Blocks(nn.Module):
    """Modules with names as long as those of large models."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.ModuleDict({"q_projection_of_attention": nn.Linear(4, 4)})
        self.layers_of_the_decoder_stack = nn.ModuleList(
            [nn.ModuleDict({"self_attention_with_rotary": inner})]
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_modules", SLOW),
        ("exclude_modules", SLOW),
        ("modules_to_save", [SLOW]),
        ("rank_pattern", {SLOW: 4}),
        ("alpha_pattern", {SLOW: 4}),
        ("layers_pattern", SLOW),
        ("rank_pattern", {"(a|aa|[a-z_.0-9]+)*Z": 4}),
        ("rank_pattern", {".*" * 12 + "Z": 4}),
    ],
)
def test_a_pattern_that_backtracks_is_refused(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"target_modules": ["q_projection_of_attention"], "r": 2, field: value}
    if field == "layers_pattern":
        fields["layers_to_transform"] = [0]
    before = time.process_time()
    with pytest.raises(ValueError, match=rf"^adapter 'a': {field}: .* takes too long to match this model"):
        convert_model(Blocks(), {"a": LoraConfig(**fields)})
    assert time.process_time() - before < 2  # of this process: the match is another one's


@pytest.mark.parametrize("value", ["(" * 20_000, "a{99999999999999999999}", "(q"])
@pytest.mark.parametrize("field", ["target_modules", "rank_pattern"])
def test_what_is_no_pattern_is_refused(field: str, value: str) -> None:
    fields: dict[str, Any] = {"target_modules": ["q_projection_of_attention"], "r": 2}
    fields[field] = {value: 4} if field == "rank_pattern" else value
    with pytest.raises(ValueError, match=f"^adapter 'a': {field}: .* is not a pattern: "):
        convert_model(Blocks(), {"a": LoraConfig(**fields)})


def test_patterns_that_cannot_backtrack_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have one process for all adapters, and the layers and ranks that PEFT gives them."""
    begun: list[Any] = []
    run = refuse.subprocess.run
    monkeypatch.setattr(refuse.subprocess, "run", lambda *a, **k: begun.append(a) or run(*a, **k))
    refuse._too_slow.cache_clear()
    names = ["q_projection_of_attention"]
    convert_model(Blocks(), {"a": LoraConfig(target_modules=names, rank_pattern={r".*attention": 3})})
    assert not begun
    several = LoraConfig(target_modules=r".*\.q_(projection|proj).*", r=2, rank_pattern={r".*_of_.*n$": 3})
    model = convert_model(Blocks(), {"a": several, "b": several})
    assert len(begun) == 1
    assert {tuple(p.shape) for n, p in model.named_parameters() if "lora_A" in n} == {torch.Size([3, 4])}


def test_other_adapters_add_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a model with many adapters would take ever longer, until a right pattern is refused."""
    asked = []
    monkeypatch.setattr(refuse, "_too_slow", lambda keys, _: asked.append(keys))
    config = LoraConfig(r=2, target_modules=r".*\.(q|k)_proj.*|.*q_projection.*")
    model = convert_model(Blocks(), {"a": config})
    add_adapter(model, "b", config)
    assert asked[-1] == asked[0]
