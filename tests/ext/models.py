"""Small random models, converted ones, and the PEFT models they are compared with."""

import copy
from collections.abc import Mapping, Sequence

import torch
from peft import LoraConfig, get_peft_model
from tolerances import STEADY_EPSILON, assert_same_up_to_rounding
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import mlora_ext as mx
from mlora_ext.layers.adapter_layer import AdapterLayer
from mlora_ext.layers.adapter_weights import adapter_layers
from mlora_ext.layers.copies import TrainedCopies
from mlora_ext.layers.over_module import RowSource

VOCABULARY = 61
NAMES = ["a", "b", "__base__", "a"]
CONFIGS = {
    "a": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.4, init_lora_weights=False),
    "b": LoraConfig(r=7, target_modules=["q_proj", "down_proj"], lora_dropout=0.2, init_lora_weights=False),
}


def llama(layers: int = 2) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
            initializer_range=0.2,
        )
    )


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=64,
            pad_token_id=0,
            eos_token_id=1,
            initializer_range=0.2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def norm_in_any_dtype(self: LlamaRMSNorm, x: torch.Tensor) -> torch.Tensor:
    """What Transformers computes in fp32 in a model of fp64, too."""
    return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


def peft_model(base: nn.Module, configs: Mapping[str, LoraConfig]) -> nn.Module:
    """PEFT's model over a copy of the base, every adapter trainable, with random weights."""
    model = None
    for name, config in configs.items():
        config = copy.deepcopy(config)
        if model is None:
            model = get_peft_model(copy.deepcopy(base), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    assert model is not None
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            parameter.data.normal_(std=0.2)
            parameter.requires_grad_(True)
        elif is_trained(key):
            parameter.data.add_(0.05 * torch.randn_like(parameter))
            parameter.requires_grad_(True)
    return model


def is_trained(key: str) -> bool:
    """Whether a parameter of a PEFT model is an adapter's."""
    return any(part in key for part in ("lora_", ".modules_to_save.", ".trainable_tokens_delta."))


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters of a PEFT model, without its prefix; tied rows by their embedding's name."""
    tied = tuple(f"{key}." for key, part in model.named_modules() if getattr(part, "tied_adapter", None))
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        if is_trained(key) and not key.startswith(tied):
            found.setdefault(id(parameter), (key.removeprefix("base_model.model."), parameter))
    return dict(found.values())


def copy_weights(source: nn.Module, model: nn.Module, names: Mapping[str, object]) -> None:
    """Give a converted model the adapters of a PEFT model; fails unless they sit on the same layers."""
    state = trained_parameters(source)
    mine = {key: p for name in names for key, p in by_peft_key(model, name).items()}
    assert set(mine) == set(state)
    with torch.no_grad():
        for key, parameter in mine.items():
            assert parameter.shape == state[key].shape, key
            parameter.copy_(state[key])


def by_peft_key(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """An adapter's Parameters by the names that PEFT's model has for them, without its prefix."""
    return {
        f"{key}.{_with_name(layer, name, own)}": layer.parameters_of(name)[part]
        for key, layer in adapter_layers(model, name).items()
        for part, own in layer.peft_keys(layer, layer.specs[name]).items()
        if part in layer.parameters_of(name)
    }


def _with_name(layer: AdapterLayer, name: str, key: str) -> str:
    """A key of PEFT's files as PEFT's model has it: with the adapter's name."""
    if isinstance(layer, TrainedCopies):
        return f"modules_to_save.{name}.{key}"
    of_a_table = isinstance(layer, RowSource)  # PEFT keeps these without a module around them
    return f"{key}.{name}" if of_a_table else f"{key.removesuffix('.weight')}.{name}.weight"


def assert_same_gradients(
    ours: nn.Module, peft: nn.Module, name: str, tolerance: float = 1e-5, *, all_reached: bool = True
) -> None:
    """Compares those of an adapter with PEFT's, one by one; those that no row reached are None in both."""
    state = trained_parameters(peft)
    for key, parameter in by_peft_key(ours, name).items():
        theirs = state[key].grad
        assert (parameter.grad is None) == (theirs is None), key
        assert not all_reached or (theirs is not None and theirs.any()), key
        if theirs is not None:
            assert_same_up_to_rounding(parameter.grad, theirs, key, tolerance)


@torch.no_grad()
def logits_of(model: nn.Module, ids: torch.Tensor, **named: object) -> torch.Tensor:
    return model(input_ids=ids, **named).logits


def token_ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, length))


def converted(layers: int = 2, **configs: LoraConfig) -> nn.Module:
    return mx.convert_model(llama(layers), configs or CONFIGS, seed=int(torch.randint(2**31, ())))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert one
    for key, value in one.items():
        assert_same_up_to_rounding(value, other[key], key)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def losses_of_own(
    model: nn.Module, parameters: Sequence[nn.Parameter] | None = None, names: Sequence[str] | None = None
) -> list[float]:
    """The losses of the first two samples, which are of one adapter, as all parameters train for some steps.

    `names` of a converted model are those of its samples' adapters; the others train on their own samples.
    """
    draw, losses = torch.Generator(torch.get_default_device()).manual_seed(3), []
    parameters = parameters or [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, eps=STEADY_EPSILON)
    for _ in range(25):
        ids = torch.randint(2, VOCABULARY, (5, 7), generator=draw)
        if names is None:
            loss = total = loss_of(model(input_ids=ids[:2]).logits, ids[:2])
        else:
            logits = model(input_ids=ids[: len(names)], adapter_names=names).logits
            loss = loss_of(logits[:2], ids[:2])
            total = loss + sum(loss_of(logits[i : i + 1], ids[i : i + 1]) for i in range(2, len(names)))
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
