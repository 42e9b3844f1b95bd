"""One family's outcome: a mixed batch on the converted model against PEFT's single-adapter runs, in fp64."""

import ast
import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from mended import bias_beside_trained_rows
from models import by_peft_key, copy_weights, peft_model, trained_parameters
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import mlora_ext as mx
from mlora_ext.routing.trial_passes import FAILURES

Sample = dict[str, Tensor]
RANKS = {"a": 4, "b": 12}
# A usual error is 1e-15; models without norms amplify it. A neighbour's adapter gives over 1e-2.
TOLERANCE = 1e-9
SMALL = 1e-6
_ATTEMPTS = 16
NAMES = ["a", "b", "__base__", "a"]
_TO_SINGLE = (Tensor.float, Tensor.to, Tensor.type, torch.softmax, nn.functional.softmax)


# Kept for a next call, or of the batch: not laid out by sample.
_STATES = {"mems", "past_key_values", "cache_params", "state", "logits_per_text", "logits_per_image"}


@dataclass
class Outcome:
    """What became of a family.

    Attributes:
        verdict: "equal", "refused", or "PEFT refuses".
        targets: fields of PEFT's `LoraConfig` with which it is so.
        reasons: what was refused on the way.
    """

    verdict: str
    targets: dict[str, Any]
    reasons: list[str]


@dataclass
class _Expected:
    """What PEFT gives for a batch: `outputs` by sample, and gradients by name if it was in training mode."""

    training: bool
    samples: Sequence[Sample]
    outputs: list[list[Tensor]]
    gradients: dict[str, Tensor]


class _Refused(Exception):
    """A ValueError of ours: PEFT's and the model's own are errors of this test."""


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise _Refused(str(error)) from error


class _Doubles(TorchFunctionMode):
    """Casts to fp32, which many models make on the way, stay in fp64: no rounding to hide in."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        named = named or {}
        wide = bool(arguments) and isinstance(arguments[0], Tensor) and arguments[0].dtype == torch.float64
        if wide and function is Tensor.float:
            return arguments[0]
        if wide and function in _TO_SINGLE:
            arguments = tuple(torch.float64 if one is torch.float32 else one for one in arguments)
            if named.get("dtype") is torch.float32:
                named = {**named, "dtype": torch.float64}
        return function(*arguments, **named)


@contextmanager
def all_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubles(), mx.use_backend("reference"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


def outcome(model: nn.Module, batches: Sequence[Sequence[Sample]], names: list[str]) -> Outcome:
    """Compare one model; the advice of a refusal is followed, so that it is tested, too.

    Args:
        model: a base model in fp64.
        batches: inputs of each sample of each batch, to be put together along the first dimension.
        names: `adapter_names`, one per sample.

    Raises:
        AssertionError: if a number is wrong, or no output depends on the adapters.
    """
    targets: dict[str, Any] = {"target_modules": "all-linear"}
    reasons: list[str] = []
    with all_double():
        for _ in range(_ATTEMPTS):
            try:
                _compare_all(model, _configs(targets), batches, names)
            except _Refused as error:
                reasons.append(str(error))
                advice = _advice(reasons[-1], targets)
                if advice is None:
                    return Outcome("refused", targets, reasons)
                targets = advice
            else:
                return Outcome("equal", targets, reasons)
    return Outcome("refused", targets, reasons)


def outcome_of_parts(
    model: nn.Module,
    batches: Sequence[Sequence[Sample]],
    names: list[str],
    configs: dict[str, LoraConfig],
    parts: Sequence[Sequence[str]],
) -> Outcome:
    """Compare adapters that also train some parts of the model, such as a head.

    Args:
        configs: of the adapters, by name.
        parts: names of modules; in each list one must have a gradient.

    Raises:
        AssertionError: if a number is wrong, or a part never has a gradient.
    """
    with all_double(), bias_beside_trained_rows():
        try:
            peft = peft_model(model, configs)
            expected = list(_expected(peft, batches, names))
        except FAILURES as error:
            return Outcome("PEFT refuses", {}, [f"{type(error).__name__}: {error}"])
        for part in parts:
            found = [
                float(gradient.norm())
                for one in expected
                for key, gradient in one.gradients.items()
                if key.startswith(tuple(f"{module}." for module in part))
            ]
            assert any(found), f"{', '.join(part)}: PEFT's gradients are all zero, so they show nothing"
        try:
            with _refusing():
                ours = mx.convert_model(copy.deepcopy(model), configs)
            copy_weights(peft, ours, RANKS)
            for one in expected:
                _compare(ours, one, names)
        except _Refused as error:
            return Outcome("refused", {}, [str(error)])
        return Outcome("equal", {}, [])


def following_advice(convert: Callable[[dict[str, LoraConfig]], nn.Module]) -> nn.Module:
    """A model converted on all linear layers but those that refusals say to leave out."""
    targets: dict[str, Any] | None = {"target_modules": "all-linear"}
    for _ in range(_ATTEMPTS):
        try:
            return convert(_configs(targets))
        except ValueError as error:
            targets = _advice(str(error), targets)
            if targets is None:
                raise
    raise AssertionError("refusals without end")


def _configs(targets: dict[str, Any]) -> dict[str, LoraConfig]:
    return {name: LoraConfig(r=rank, lora_alpha=8, **targets) for name, rank in RANKS.items()}


def _advice(message: str, targets: dict[str, Any]) -> dict[str, Any] | None:
    """The same targets, changed as a refusal says."""
    if "do not target this layer" in message:
        layer = message.split(": ")[0].removeprefix("layer ")
        return _excluding(re.sub(r"\d+", r"\\d+", layer), targets)
    found = re.search(r"(target|exclude)_modules=(\[[^\]]+\])$", message)
    if found is None:
        return None
    names = ast.literal_eval(found[2])
    if found[1] == "exclude":
        return _excluding(rf"(.*\.)?{names[0]}", targets)
    return None if targets["target_modules"] == names else targets | {"target_modules": names}


def _excluding(pattern: str, targets: dict[str, Any]) -> dict[str, Any]:
    """PEFT's pattern of names to leave out, with one more."""
    return targets | {"exclude_modules": "|".join(filter(None, [targets.get("exclude_modules"), pattern]))}


def collate(samples: Sequence[Sample]) -> Sample:
    return {key: torch.cat([sample[key] for sample in samples]) for key in samples[0]}


def _compare_all(
    model: nn.Module,
    configs: dict[str, LoraConfig],
    batches: Sequence[Sequence[Sample]],
    names: Sequence[str],
) -> None:
    with _refusing():
        ours = mx.convert_model(copy.deepcopy(model), configs)
    peft = peft_model(model, configs)
    copy_weights(peft, ours, RANKS)
    for expected in _expected(peft, batches, names):
        _compare(ours, expected, names)


def _expected(
    peft: nn.Module, batches: Sequence[Sequence[Sample]], names: Sequence[str]
) -> Iterator[_Expected]:
    for samples in batches:
        for training in (False, True):
            outputs = _alone(peft, samples, names, training)
            yield _Expected(
                training, samples, outputs, _gradients(trained_parameters(peft)) if training else {}
            )


def _compare(ours: nn.Module, expected: _Expected, names: Sequence[str]) -> None:
    ours.train(expected.training)
    ours.zero_grad()
    with _refusing():
        output = ours(**collate(expected.samples), adapter_names=list(names))
    mine = _per_sample(output, len(names))
    assert len(mine) == len(expected.outputs[0])
    for index, got in enumerate(mine):
        for row, name in enumerate(names):
            mode = "training" if expected.training else "eval"
            what = f"output {index}, {mode}, row {row} of adapter {name}"
            assert_same_up_to_rounding(
                got[row].detach(), expected.outputs[row][index].detach(), what, TOLERANCE
            )
    if expected.training:
        _loss(mine, range(len(names))).backward()
        own = {key: p for name in RANKS for key, p in by_peft_key(ours, name).items()}
        _assert_gradients(_gradients(own), expected.gradients)


def _alone(
    peft: nn.Module, samples: Sequence[Sample], names: Sequence[str], training: bool
) -> list[list[Tensor]]:
    """What PEFT gives for each sample, in one run per adapter; in training with its backward pass."""
    _train(peft, training)
    peft.zero_grad()
    found: dict[int, list[Tensor]] = {}
    for name in dict.fromkeys(names):
        places = [place for place, other in enumerate(names) if other == name]
        batch = collate([samples[place] for place in places])
        if name == "__base__":
            with peft.disable_adapter():
                outputs = _per_sample(peft(**batch), len(places))
        else:
            peft.set_adapter(name)
            outputs = _per_sample(peft(**batch), len(places))
            if training:
                _loss(outputs, places).backward()
        for index, place in enumerate(places):
            found[place] = [output[index] for output in outputs]
    return [found[place] for place in range(len(names))]


def loss_of(output: object, batch: int) -> Tensor:
    """A number that depends on all that a model gives for each sample."""
    return _loss(_per_sample(output, batch), range(batch))


def _loss(outputs: Sequence[Tensor], places: Iterable[int]) -> Tensor:
    """A weighted sum, whose weights are a function of the sample's place and the output's."""
    terms = []
    for index, place in enumerate(places):
        generator = torch.Generator(torch.get_default_device()).manual_seed(place)
        terms += [(t[index] * torch.randn(t[index].shape, generator=generator)).sum() for t in outputs]
    return torch.stack(terms).sum()


def _train(peft: nn.Module, training: bool) -> None:
    """Batch normalisations of the base stay in evaluation mode, as ours do; adapters' copies train."""
    peft.train(training)
    for name, module in peft.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and ".modules_to_save." not in name:
            module.eval()


def _per_sample(output: object, batch: int) -> list[Tensor]:
    """Every floating tensor of a model's output that has an equal part for each sample, as [B, ...]."""
    found = [t.reshape(batch, -1, *t.shape[1:]) for t in _tensors(output) if t.shape[0] % batch == 0]
    assert found, "no output has a part for each sample"
    return found


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 0 and output.numel():
        yield output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            if key == "pooler_output" and isinstance(value, list | tuple):  # of images: one of each sample
                yield torch.stack(list(value))
            elif "loss" not in key and key not in _STATES:
                yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)


def _gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {key: torch.zeros_like(p) if p.grad is None else p.grad.clone() for key, p in parameters.items()}


def _assert_gradients(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Each within the tolerance; one far smaller than the adapter's largest is mostly rounding of that."""
    assert mine.keys() == theirs.keys()
    for name in RANKS:
        keys = [key for key in mine if f".{name}." in f"{key}."]
        scale = max(float(theirs[key].norm()) for key in keys)
        assert scale > 0, f"adapter {name}: PEFT's gradients are all zero, so they show nothing"
        for key in keys:
            difference = float((mine[key] - theirs[key]).norm())
            allowed = TOLERANCE * max(float(theirs[key].norm()), SMALL * scale)
            assert difference <= allowed, f"gradient of {key}: error {difference:.2e}, allowed {allowed:.2e}"
