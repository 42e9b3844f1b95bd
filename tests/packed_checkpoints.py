"""Tiny GPTQ and AWQ layers and checkpoints: random weights, packed by gptqmodel's own functions.

Nothing is calibrated: each group is rounded between its least and its largest number. Letters: O = d_out,
D = d_in, G groups.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig, PreTrainedModel


def packed(
    plain: nn.Linear,
    method: str,
    bits: int = 4,
    group_size: int = 32,
    act_order: bool = False,
    kernel: type[nn.Module] | None = None,
    zeros_of_files: bool = False,
) -> Any:
    """Returns a layer of gptqmodel with a linear layer's weight.

    `kernel` is its class, by default Torch's. `zeros_of_files`: with GPTQ's zeros as files of the format
    `gptq` have them, one less than layers do.
    """
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    d_in, d_out = plain.in_features, plain.out_features
    kernel = kernel or (TorchLinear if method == "gptq" else AwqTorchLinear)
    layer: Any = kernel(
        bits=bits,
        group_size=group_size,
        sym=False,
        desc_act=act_order,
        in_features=d_in,
        out_features=d_out,
        bias=plain.bias is not None,
        register_buffers=True,
    )
    size = d_in if group_size == -1 else group_size
    g_idx = torch.arange(d_in, dtype=torch.int32) // size
    if act_order:
        g_idx = g_idx[torch.randperm(d_in)]
    scales_OG, zeros_OG = _ranges(plain.weight.detach(), g_idx, bits)
    with torch.no_grad():
        pack = layer.pack_original if method == "gptq" else layer.pack
        pack(plain, scales_OG, zeros_OG, g_idx)
    if zeros_of_files and method == "gptq":
        convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=bits, offload_to_disk=False))
    return layer


def _ranges(weight: Tensor, g_idx: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns scales in fp16's numbers, and zeros, both `[O, G]`.

    No zero is 0, which format 1 cannot hold, and no number is rounded beyond the largest integer.
    """
    scales, zeros = [], []
    for group in range(int(g_idx.max()) + 1):
        own = weight[:, g_idx == group]
        least, most = own.amin(1).clamp(max=-1e-3), own.amax(1).clamp(min=1e-3)
        scale = (1.01 * (most - least) / (2**bits - 2)).half().float()
        scales.append(scale)
        zeros.append((-least / scale).ceil().clamp(1, 2**bits - 2))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def save_packed(
    base: Path,
    folder: Path,
    method: str,
    bits: int = 4,
    group_size: int = 32,
    act_order: bool = False,
) -> Path:
    """Writes a checkpoint as other tools publish it: a plain one's linear layers of blocks, packed."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for name in [key for key in tensors if key.endswith("proj.weight")]:
        weight = tensors.pop(name)
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        plain.weight.data = weight.float()
        layer = packed(plain, method, bits, group_size, act_order, zeros_of_files=True)
        for part, tensor in layer.state_dict().items():
            tensors[f"{name.removesuffix('weight')}{part}"] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    said: dict[str, Any] = {"quant_method": method, "bits": bits, "group_size": group_size}
    if method == "gptq":
        said |= {"desc_act": act_order, "sym": False, "checkpoint_format": "gptq"}
    else:
        said |= {"zero_point": True, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return folder


def load_packed(folder: Path, method: str, bits: int = 4, backend: str = "auto_trainable") -> PreTrainedModel:
    """Returns the model as Transformers loads it.

    The default kernel of 4 bits on some processors refuses to train; `auto_trainable` asks for another. The
    library compiles what dequantises, for minutes; the layers get the plain function back.
    """
    config = AwqConfig(backend=backend) if method == "awq" else GPTQConfig(bits=bits, backend=backend)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    for module in model.modules():
        module.__dict__.pop("dequantize_weight", None)
    return model
