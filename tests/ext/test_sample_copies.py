"""Copies of modules that need whole samples: convolutions and batch normalisation, as in PEFT alone."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import by_peft_key, copy_weights, peft_model, trained_parameters
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn

import mlora_ext as mx
from mlora_ext.interop.trainer_checkpoint import install, save

NAMES = ["b", "a", "__base__", "a", "b", "c"]


class Head(nn.Module):
    """Takes a list of maps and a size, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)

    def forward(self, maps: list[Tensor], size: int) -> dict[str, Tensor]:
        y = torch.relu(self.norm(self.conv(maps[0] + maps[1])))
        return {"maps": y, "means": nn.functional.adaptive_avg_pool2d(y, size).flatten(1)}


class Model(nn.Module):
    """Samples `[B, 3, 4, 4]`, with linear layers on each pixel's channels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.before = nn.Linear(3, 3), nn.BatchNorm2d(3)
        self.head = Head()

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.before(self.body(pixel_values.movedim(1, -1)).movedim(-1, 1))
        found = self.head([x, x.tanh()], size=2)
        return torch.cat([found["maps"].flatten(1), found["means"]], 1)


def model_of() -> nn.Module:
    model = Model()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    return model.train()


def lora(**fields: Any) -> LoraConfig:
    return LoraConfig(r=2, target_modules=["body"], init_lora_weights=False, **fields)


CONFIGS = {
    "a": lora(modules_to_save=["head"]),
    "b": lora(modules_to_save=["head", "before"]),
    "c": lora(),
}


def converted(model: nn.Module, configs: Any = CONFIGS) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*stay in evaluation mode")
        return mx.convert_model(copy.deepcopy(model), copy.deepcopy(configs))


def keep_base(peft: nn.Module) -> nn.Module:
    """Puts the base's batch normalisations into evaluation mode, where ours stay."""
    for key, part in peft.train().named_modules():
        if isinstance(part, nn.BatchNorm2d) and ".modules_to_save." not in key:
            part.eval()
    return peft


def test_trained_and_saved_as_peft_trains_each_alone(tmp_path: Path) -> None:
    with mx.use_backend("reference"):  # it takes fp64, in which a norm over few values amplifies no rounding
        check_training(model_of().double(), tmp_path)


def check_training(base: nn.Module, tmp_path: Path) -> None:
    ours, peft = converted(base), keep_base(peft_model(base, CONFIGS))
    copy_weights(peft, ours, CONFIGS)
    for _ in range(3):
        x = torch.randn(6, 3, 4, 4).double()
        mixed = ours(pixel_values=x, adapter_names=NAMES)
        mixed.square().mean(1).sum().backward()
        for name in CONFIGS:
            peft.set_adapter(name)
            places = [place for place, other in enumerate(NAMES) if other == name]
            alone = peft(pixel_values=x[places])
            alone.square().mean(1).sum().backward()
            assert_same_up_to_rounding(mixed[places].detach(), alone.detach(), name, 1e-10)
        state = trained_parameters(peft)
        with torch.no_grad():
            for name in CONFIGS:
                for key, own in by_peft_key(ours, name).items():
                    assert_same_up_to_rounding(own.grad, state[key].grad, key, 1e-10)
                    own.sub_(own.grad, alpha=0.1)
                    state[key].copy_(own)
                    own.grad = state[key].grad = None
    with torch.no_grad():
        check_folders(base, ours, peft, tmp_path)


def check_folders(base: nn.Module, ours: nn.Module, peft: nn.Module, tmp_path: Path) -> None:
    """Our folder holds what PEFT's would, loads in PEFT and here, and from_peft takes the model over."""
    x = torch.randn(2, 3, 4, 4).double()
    for name in "ab":
        mx.save_adapter(ours, name, tmp_path / name)
        loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / name)).eval()
        mine = get_peft_model_state_dict(loaded)
        theirs = get_peft_model_state_dict(peft, adapter_name=name)  # in PEFT 0.19 with others' matrices
        theirs = {key: value for key, value in theirs.items() if CONFIGS.keys().isdisjoint(key.split("."))}
        assert mine.keys() == theirs.keys()
        assert "base_model.model.head.norm.num_batches_tracked" in mine
        for key, value in theirs.items():
            assert_same_up_to_rounding(mine[key].double(), value.double(), key)
        expected = ours.eval()(pixel_values=x, adapter_names=[name] * 2)
        assert_same_up_to_rounding(loaded(pixel_values=x), expected, "our folder in PEFT")
        again = copy.deepcopy(base).eval()
        with pytest.warns(UserWarning, match="stay in evaluation mode"):
            mx.load_adapter(again, "again", tmp_path / name)
        assert torch.equal(again(pixel_values=x), expected)
        assert_same_up_to_rounding(mx.merge_and_unload(ours, name).eval()(x), expected, "merged")
    with pytest.warns(UserWarning, match="stay in evaluation mode"):
        taken = mx.from_peft(peft.eval())
    names = ["a", "b"]
    mine, others = (model.eval()(pixel_values=x, adapter_names=names) for model in (ours, taken))
    assert_same_up_to_rounding(mine, others, "from_peft")


def test_alone_as_together_and_resumed() -> None:
    model, x = converted(model_of()), torch.randn(6, 3, 4, 4)
    alone, resumed = copy.deepcopy(model), converted(model_of())
    together = model(pixel_values=x, adapter_names=NAMES)
    for name in "ab":
        own = [place for place, other in enumerate(NAMES) if other == name]
        assert_same_up_to_rounding(alone(x[own], adapter_names=[name] * len(own)), together[own], name)
        for (key, one), (_, other) in zip(alone.named_buffers(), model.named_buffers(), strict=True):
            if f".{name}." in key:
                assert_same_up_to_rounding(one.double(), other.double(), key)
    base = {key: b for key, b in model.named_buffers() if ".modules_to_save." not in key}
    assert all(torch.equal(dict(alone.named_buffers())[key], value) for key, value in base.items())
    resumed.load_state_dict(model.state_dict())
    after = [each(pixel_values=x, adapter_names=NAMES) for each in (model, resumed)]
    assert torch.equal(*after)
    x[[1, 3, 5]] = torch.nan
    others = model(pixel_values=x, adapter_names=["b", "a", "b", "a", "b", "c"])
    assert others[[0, 2, 4]].isfinite().all()


def test_a_trainers_checkpoint_has_the_statistics(tmp_path: Path) -> None:
    model, x = converted(model_of()), torch.randn(6, 3, 4, 4)
    model(pixel_values=x, adapter_names=NAMES)
    save(model, ["a", "b", "c"], tmp_path, None)
    install(model)
    stored = load_file(tmp_path / "model.safetensors")
    for key in ("head.modules_to_save.a.norm.running_mean", "before.modules_to_save.b.running_var"):
        assert torch.equal(stored[key], model.state_dict()[key])
        left_out = {other: tensor for other, tensor in stored.items() if other != key}
        assert model.load_state_dict(left_out, strict=False).missing_keys == [key]


def test_half_precision_copies_are_fp32() -> None:
    """Rounding is that of the base's parts: a bf16 model is near the fp32 model of the same numbers.

    Their gradients need not be: a batch normalisation's are small differences.
    """
    base, x = model_of().bfloat16(), torch.randn(6, 3, 4, 4, dtype=torch.bfloat16)
    half, whole, found = converted(base), converted(copy.deepcopy(base).float()), []
    for model in (half, whole):
        y = model(pixel_values=x.to(model.body.weight.dtype), adapter_names=NAMES)
        assert y.dtype == model.body.weight.dtype
        y.float().square().mean().backward()
        found.append(y.detach().float())
    assert_same_up_to_rounding(*found, "y", 3e-2)
    for own in mx.adapter_parameters(half, "a").values():
        assert own.dtype == own.grad.dtype == torch.float32
    statistics = dict(whole.named_buffers())
    for key, own in half.named_buffers():
        if ".modules_to_save." in key:
            assert own.dtype == statistics[key].dtype
            assert_same_up_to_rounding(own.double(), statistics[key].double(), key, 1e-2)


def test_a_number_for_each_sample_may_come_first() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(3, 3, 1)

        def forward(self, scale: Tensor, x: Tensor) -> Tensor:
            return self.conv(x) * scale.view(-1, 1, 1)

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), Scaled()

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.head(scale, self.body(x))

    configs = {name: lora(modules_to_save=["head"]) for name in "ab"}
    base, x, scale = Scales(), torch.randn(3, 3, 4), torch.rand(3)
    ours, peft = converted(base, configs), peft_model(base, configs)
    copy_weights(peft, ours, configs)
    mixed = ours(x, scale=scale, adapter_names=["a", "b", "a"])
    for name, places in {"a": [0, 2], "b": [1]}.items():
        peft.set_adapter(name)
        alone = peft(x[places], scale=scale[places])
        assert_same_up_to_rounding(mixed[places].detach(), alone.detach(), name)


def test_refused_where_samples_are_not_first() -> None:
    class Sideways(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(6)

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.norm(self.body(pixel_values).transpose(0, 1)).transpose(0, 1)

    model = converted(Sideways(), {name: lora(modules_to_save=["norm"]) for name in "ab"})
    x = torch.randn(6, 5, 3)
    assert model(pixel_values=x, adapter_names=["a"] * 6).shape == x.shape
    with pytest.raises(ValueError, match=r"layer norm: .* does not have samples in the first dimension"):
        model(pixel_values=x, adapter_names=["a", "b"] * 3)


def test_refused_where_a_result_has_no_part_for_each_sample() -> None:
    class Sums(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum(0)

    class Short(Model):
        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.before(self.body(pixel_values.movedim(1, -1)).movedim(-1, 1))

    base = Short()
    base.before = Sums(3, 3, 1)
    model = converted(base, {name: lora(modules_to_save=["before"]) for name in "ab"})
    with pytest.raises(ValueError, match="returns something that has no part for each sample"):
        model(pixel_values=torch.randn(4, 3, 4, 4), adapter_names=["a", "b", "a", "b"])


def test_packed_rows_are_refused() -> None:
    model = converted(model_of(), {"a": CONFIGS["a"]})
    layout = mx.SegmentLayout.from_lengths([2 * 16])
    with (
        mx.route(model, layout),
        pytest.raises(
            ValueError,
            match=r"layer head: .* needs whole samples.* are packed; .* used so: pass adapter_names=\[",
        ),
    ):
        model(pixel_values=torch.randn(2, 3, 4, 4))
