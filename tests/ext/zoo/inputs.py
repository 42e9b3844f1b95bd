"""Random inputs, sample by sample, for a model of a small configuration."""

from collections.abc import Callable
from typing import Any

import torch
from compare import Sample, all_double
from families import Family
from small import IMAGE, VOCABULARY
from torch import Tensor
from transformers import PreTrainedModel

FIRST_WORD = 10


def make_model(family: Family) -> PreTrainedModel:
    """A family's model in fp64; noise on every parameter, so that none is a zero or a one by default."""
    torch.manual_seed(0)
    with all_double():
        model = family.build().double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def make_batches(family: Family, model: PreTrainedModel) -> list[list[Sample]]:
    """Samples of two batches of 4: sequences longer than the batch, and as long; one without sequences."""
    with all_double():
        longer, square = (make_samples(family, model, 4, length) for length in (7, 4))
    same = {key: t.shape for key, t in longer[0].items()} == {key: t.shape for key, t in square[0].items()}
    return [longer] if same else [longer, square]


def make_samples(family: Family, model: PreTrainedModel, count: int, length: int) -> list[Sample]:
    """Inputs of each sample; those of a batch are these, put together along their first dimension.

    Args:
        family: which inputs beside or in place of the main one.
        model: whose main input is made.
        count: of samples.
        length: tokens or frames of each.
    """
    make = SPECIAL.get(f"{family.model_type} {family.inputs}".strip()) or SPECIAL.get(family.model_type)
    return [make(model.config, length) if make else _sample(family, model, length) for _ in range(count)]


def _sample(family: Family, model: PreTrainedModel, length: int) -> Sample:
    kinds = ["input_ids", "pixel_values"] if family.inputs == "both" else [model.main_input_name]
    sample = {kind: _main(model.config, kind, length) for kind in kinds}
    if getattr(model.config, "is_encoder_decoder", False):
        sample["decoder_input_ids"] = tokens(min(length, 5))
    return sample


def tokens(length: int) -> Tensor:
    return torch.randint(FIRST_WORD, VOCABULARY, (1, length))


def image(config: Any) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size: Any = getattr(vision, "image_size", IMAGE)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(1, getattr(vision, "num_channels", 3), height, width)


def _main(config: Any, kind: str, length: int) -> Tensor:
    if kind in ("input_ids", "decoder_input_ids"):
        return tokens(length)
    if kind == "pixel_values":
        return image(config)
    if kind == "input_values":
        return torch.randn(1, 1600)
    if kind == "input_features":
        return torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions)
    raise ValueError(f"no inputs are known for {kind}")


def _video(config: Any, length: int) -> Sample:
    return {"pixel_values": torch.stack([image(config) for _ in range(config.num_frames)], dim=1)}


def _spectrogram(config: Any, length: int) -> Sample:
    return {"input_values": torch.randn(1, config.max_length, config.num_mel_bins)}


def _speech(config: Any, length: int) -> Sample:
    frames = torch.randn(1, 4 * length, config.input_feat_per_channel)
    return {"input_features": frames, "decoder_input_ids": tokens(length)}


def _moonshine(config: Any, length: int) -> Sample:
    return {"input_values": torch.randn(1, 4000), "decoder_input_ids": tokens(length)}


def _with_images(per_image: Callable[[Any], int], index: str) -> Callable[[Any, int], Sample]:
    """Tokens, the first of which stand for the features of one image."""

    def make(config: Any, length: int) -> Sample:
        place = torch.full((1, per_image(config)), getattr(config, index))
        return {"input_ids": torch.cat([place, tokens(length)], 1), "pixel_values": image(config)}

    return make


def _qwen_images(config: Any, length: int) -> Sample:
    """Each sample has one image of 4 x 4 patches, which become 2 x 2 tokens."""
    vision = config.vision_config
    sizes = vision.temporal_patch_size * vision.patch_size**2 * 3
    place = torch.full((1, 4), config.image_token_id)
    ids = torch.cat([torch.full((1, 1), config.vision_start_token_id), place, tokens(length)], 1)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == config.image_token_id).long(),
        "pixel_values": torch.randn(16, sizes),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def _series(config: Any, length: int) -> Sample:
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": torch.randn(1, past),
        "past_time_features": torch.randn(1, past, config.num_time_features),
        "past_observed_mask": torch.ones(1, past),
        "future_values": torch.randn(1, future),
        "future_time_features": torch.randn(1, future, config.num_time_features),
    }


def _patches(config: Any, length: int) -> Sample:
    return {"past_values": torch.randn(1, config.context_length, config.num_input_channels)}


def _decisions(config: Any, length: int) -> Sample:
    return {
        "states": torch.randn(1, length, config.state_dim),
        "actions": torch.randn(1, length, config.act_dim),
        "rewards": torch.randn(1, length, 1),
        "returns_to_go": torch.randn(1, length, 1),
        "timesteps": torch.arange(length).unsqueeze(0),
        "attention_mask": torch.ones(1, length),
    }


def _lxmert(config: Any, length: int) -> Sample:
    return {
        "input_ids": tokens(length),
        "visual_feats": torch.randn(1, 5, config.visual_feat_dim),
        "visual_pos": torch.rand(1, 5, config.visual_pos_dim),
    }


def _visual_bert(config: Any, length: int) -> Sample:
    return {
        "input_ids": tokens(length),
        "attention_mask": torch.ones(1, length, dtype=torch.long),
        "visual_embeds": torch.randn(1, 5, config.visual_embedding_dim),
        "visual_attention_mask": torch.ones(1, 5, dtype=torch.long),
    }


def _patches_of(config: Any) -> int:
    vision = getattr(config, "vision_config", config)
    return (vision.image_size // vision.patch_size) ** 2


SPECIAL: dict[str, Callable[[Any, int], Sample]] = {
    "audio-spectrogram-transformer": _spectrogram,
    "decision_transformer": _decisions,
    "llava": _with_images(_patches_of, "image_token_index"),
    "lxmert": _lxmert,
    "moonshine": _moonshine,
    "paligemma": _with_images(_patches_of, "image_token_index"),
    "patchtsmixer": _patches,
    "patchtst": _patches,
    "qwen2_5_vl": _qwen_images,
    "qwen2_vl": _qwen_images,
    "speech_to_text": _speech,
    "time_series_transformer": _series,
    "timesformer": _video,
    "videomae": _video,
    "wav2vec2-bert": lambda config, length: {
        "input_features": torch.randn(1, 3 * length, config.feature_projection_input_dim)
    },
    "perceiver": lambda config, length: {"inputs": tokens(length)},
    "vit_mae": lambda config, length: {
        "pixel_values": image(config),
        "noise": torch.rand(1, _patches_of(config)),
    },
    "visual_bert": _visual_bert,
    "vivit": _video,
}
