"""Images as one list of patches: each sample's own adapter, where patches can be told apart by sample."""

import copy

import pytest
import torch
from compare import RANKS, Sample, collate
from families import FAMILIES
from inputs import tokens
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from torch import nn

import mlora_ext as mx

NAMES = ["a", "b", "__base__", "b"]
CANNOT_TELL = r"layer model\.visual\.blocks\.0\.attn\.qkv: cannot tell which rows"


@pytest.fixture(scope="module")
def qwen() -> nn.Module:
    """Small Qwen2-VL in fp32, with random adapters on all linear layers: also on those that see patches."""
    torch.manual_seed(0)
    base = next(one for one in FAMILIES if one.kind == "Qwen2VLForConditionalGeneration").build()
    configs = {
        name: LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
        for name, rank in RANKS.items()
    }
    return mx.convert_model(base, configs).eval()


def sample(model: nn.Module, *sizes: tuple[int, int], words: int = 5, video: bool = False) -> Sample:
    """A text with images, or one video, of `height x width` patches."""
    config = model.config
    stands = config.video_token_id if video else config.image_token_id
    pieces = [tokens(2)]
    for height, width in sizes:
        place = torch.full((1, height * width // 4), stands)
        pieces += [torch.full((1, 1), config.vision_start_token_id), place, tokens(1)]
    ids = torch.cat([*pieces, tokens(words)], 1)
    vision = config.vision_config
    columns = vision.temporal_patch_size * vision.patch_size**2 * 3
    kind = "video" if video else "image"
    values = "pixel_values_videos" if video else "pixel_values"
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == stands).long() * (2 if video else 1),
        values: torch.randn(sum(height * width for height, width in sizes), columns),
        f"{kind}_grid_thw": torch.tensor([[1, *size] for size in sizes]),
    }


@torch.no_grad()
def check(model: nn.Module, samples: list[Sample], names: list[str] = NAMES) -> None:
    together = model(**collate(samples), adapter_names=names).logits
    for row, name in enumerate(names):
        alone = model(**samples[row], adapter_names=[name]).logits[0]
        assert_same_up_to_rounding(together[row], alone, f"sample {row} of {name}")


def test_images_of_one_size_then_of_another_and_two_of_them(qwen: nn.Module) -> None:
    for sizes in ([(4, 4)], [(4, 8)], [(4, 4), (4, 4)], [(2, 2)]):
        check(qwen, [sample(qwen, *sizes) for _ in NAMES])


def test_videos(qwen: nn.Module) -> None:
    check(qwen, [sample(qwen, (4, 4), video=True) for _ in NAMES])


def test_what_cannot_be_told_apart_is_refused_before_and_after_what_can(qwen: nn.Module) -> None:
    fresh = copy.deepcopy(qwen)
    fresh.mlora_router.forget_places()
    same_length = [sample(qwen, (4, 4), words=5), sample(qwen, (4, 8), words=1)]
    another_order = [sample(qwen, (4, 4), (2, 8), words=5), sample(qwen, (2, 8), (4, 4), words=5)]
    unequal_counts = [sample(qwen, (4, 4), (4, 4), words=1), sample(qwen, words=13)]
    for model, batches in ((qwen, [same_length, another_order, unequal_counts]), (fresh, [same_length])):
        for samples in batches:
            samples = [{k: v for k, v in one.items() if v.numel()} for one in samples]
            batch = {k: torch.cat([one[k] for one in samples if k in one]) for k in samples[0]}
            with pytest.raises(ValueError, match=CANNOT_TELL):
                model(**batch, adapter_names=["a", "b"])
            assert model(**batch, adapter_names=["a", "a"]).logits.isfinite().all()
        check(model, [sample(qwen, (4, 4)) for _ in NAMES])
