"""Base models that are refused before anything is loaded, and names of models on the hub."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from command_line import Run, only_line
from huggingface_hub import errors
from mlora.config.strict import is_hub_id
from mlora.model.base_info import check_base
from mlora.model.pretrained import load_whole, skeleton
from tiny_run import run_data, write_run


@pytest.mark.parametrize("load", [load_whole, skeleton])
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_quantized_models(
    load: Callable[[str, torch.dtype], Any], field: str, tiny_base: Path, tmp_path: Path
) -> None:
    """Before a weight is read: there is none in this folder."""
    config = json.loads((tiny_base / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {field: {"quant_method": "compressed-tensors"}})
    )
    with pytest.raises(
        ValueError,
        match=r"^base_model: .* is quantized \(compressed-tensors\), .* Transformers reads it with comp",
    ):
        load(str(tmp_path), torch.float32)


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.2-1B", "some_org/model.v2"])
def test_names_of_the_hub(name: str) -> None:
    assert is_hub_id(name)


@pytest.mark.parametrize("name", ["./x", "../x", "/x", "~/x", "a/b/c", "a/", "a b", "", ".."])
def test_names_of_folders(name: str) -> None:
    assert not is_hub_id(name)


def answer(error: type[errors.HfHubHTTPError], **more: object) -> errors.HfHubHTTPError:
    response = SimpleNamespace(headers={}, request=None, status_code=503)
    return error("two\nlines", response=response, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.HTTPError("no route"), "no answer (no route)"),
        (answer(errors.RepositoryNotFoundError), "there is no such model, or it is private"),
        (answer(errors.GatedRepoError), "it is gated; ask for access at https://huggingface.co/no-one/x"),
        (answer(errors.RemoteEntryNotFoundError), "it has no config.json"),
        (answer(errors.HfHubHTTPError), "status 503"),
        (answer(errors.HfHubHTTPError, server_message="closed today"), "closed today"),
        (errors.OfflineModeIsEnabled(), "it is not in the cache, and HF_HUB_OFFLINE forbids downloads"),
    ],
)
def test_the_hub_is_asked_once_and_its_answer_is_one_line(
    error: Exception, expected: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def ask(url: str, timeout: float) -> None:
        asked.append((url, timeout))
        raise error

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    path = write_run(tmp_path, run_data(Path("no-one/x"), tmp_path))
    line = only_line(run("validate", path))
    assert line.startswith(
        f"error: base_model: no such folder: {tmp_path}/no-one/x, and the hub cannot provide no-one/x: "
    )
    assert expected in line
    assert [(url.endswith("no-one/x/resolve/main/config.json"), timeout) for url, timeout in asked] == [
        (True, 5.0)
    ]


@pytest.mark.parametrize("name", ["model", "./model"])
def test_a_file_is_no_base_model(name: str, run: Run, tmp_path: Path) -> None:
    data = run_data(tmp_path, tmp_path) | {"base_model": name}
    (tmp_path / "model").touch()
    line = only_line(run("validate", write_run(tmp_path, data)))
    assert line.endswith(
        f"base_model: {tmp_path}/model is a file; expected a model's folder or a model on the hub"
    )


def test_a_model_in_the_cache_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: pytest.fail("asked"))
    check_base("no-one/x")


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
