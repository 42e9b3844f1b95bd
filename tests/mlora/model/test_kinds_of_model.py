"""Bases that are no causal language models: one plain sentence, before anything is loaded."""

from pathlib import Path

import pytest
import torch
import transformers
from mlora.model.pretrained import load_whole, skeleton

BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
ENCODER = r"bert is an encoder \(its config\.json does not set is_decoder\); mlora trains causal language"


@pytest.mark.parametrize("read", [load_whole, skeleton])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.T5Config(), "t5 is an encoder-decoder model; mlora trains causal language models"),
        (transformers.ViTConfig(), "vit is not a causal language model; mlora trains causal language models"),
        (transformers.BertConfig(), ENCODER),
    ],
    ids=["t5", "vit", "bert"],
)
def test_other_kinds_are_refused_in_a_sentence(
    read, config: transformers.PreTrainedConfig, message: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"base_model: cannot load .*: {message}") as caught:
        read(str(tmp_path), torch.float32)
    assert len(str(caught.value)) < 150 + len(str(tmp_path))


def test_bert_as_a_decoder_is_read(tmp_path: Path) -> None:
    config = transformers.BertConfig(**BERT, vocab_size=32, is_decoder=True)
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    assert load_whole(str(tmp_path), torch.float32).config.is_decoder
