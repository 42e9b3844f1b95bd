"""The families of Transformers that the zoo runs: classes, groups and inputs."""

from dataclasses import dataclass, field
from typing import Any

import transformers
from changes import CHANGES
from small import small_config
from transformers.models.auto import modeling_auto


@dataclass(frozen=True)
class Family:
    """One class of models.

    Attributes:
        model_type: Transformers' name of its configuration.
        kind: name of the class.
        group: decoder, encoder, ...; for the table.
        changes: fields of the configuration, where small sizes by name do not fit.
        inputs: names of inputs beside or in place of the main one.
    """

    model_type: str
    kind: str
    group: str
    changes: dict[str, Any] = field(default_factory=dict)
    inputs: str = ""

    def build(self) -> transformers.PreTrainedModel:
        """A random model; experts run one by one, since grouped products know no fp64."""
        model = getattr(transformers, self.kind)(small_config(self.model_type, self.changes))
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        if self.model_type == "reformer":
            model.enable_input_require_grads()  # its reversible layers give no gradients otherwise
        return model.eval()


def _families(group: str, mapping: str, names: str, inputs: str = "") -> list[Family]:
    classes = getattr(modeling_auto, f"MODEL{mapping}_MAPPING_NAMES")
    kinds = {name: classes[name] for name in names.split()}
    return [
        Family(name, kind if isinstance(kind, str) else kind[-1], group, CHANGES.get(name, {}), inputs)
        for name, kind in kinds.items()
    ]


FAMILIES = [
    *_families(
        "decoder",
        "_FOR_CAUSAL_LM",
        """apertus arcee bamba biogpt bitnet bloom codegen cohere cohere2 ctrl deepseek_v3 diffllama doge
        ernie4_5 exaone4 falcon falcon_h1 falcon_mamba gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2
        gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe helium hunyuan_v1_dense jamba
        jetmoe lfm2 llama llama4_text mamba mamba2 minicpm3 minimax ministral mistral mixtral mpt
        nanochat nemotron olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2
        qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma rwkv smollm3 stablelm starcoder2 xglm xlnet
        xlstm zaya""",
    ),
    *_families(
        "encoder",
        "_FOR_MASKED_LM",
        """albert big_bird camembert convbert data2vec-text deberta deberta-v2 esm eurobert flaubert fnet
        funnel ibert longformer luke megatron-bert mobilebert modernbert mpnet mra nomic_bert
        nystromformer perceiver reformer rembert roc_bert roformer squeezebert tapas xlm xlm-roberta
        xmod yoso""",
    ),
    *_families(
        "encoder with a pooler",
        "_FOR_SEQUENCE_CLASSIFICATION",
        "bert canine distilbert electra ernie layoutlm roberta gpt2 llama",
    ),
    *_families(
        "encoder-decoder",
        "_FOR_SEQ_TO_SEQ_CAUSAL_LM",
        """bart bigbird_pegasus blenderbot fsmt led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus
        pegasus_x plbart prophetnet switch_transformers t5 t5gemma umt5""",
    ),
    *_families(
        "vision",
        "_FOR_IMAGE_CLASSIFICATION",
        """beit clip convnext convnextv2 cvt data2vec-vision deit dinov2 dinov2_with_registers donut-swin
        focalnet ijepa imagegpt levit mobilevit poolformer pvt_v2 regnet resnet segformer siglip swin
        swinv2 vit vit_msn""",
    ),
    *_families("vision", "", "vit_mae yolos videomae vivit timesformer"),
    *_families("vision", "_FOR_DEPTH_ESTIMATION", "dpt"),
    *_families(
        "audio",
        "_FOR_AUDIO_CLASSIFICATION",
        """audio-spectrogram-transformer data2vec-audio hubert sew sew-d unispeech wav2vec2 wav2vec2-bert
        wavlm whisper""",
    ),
    *_families("audio", "_FOR_SPEECH_SEQ_2_SEQ", "speech_to_text whisper moonshine"),
    *_families("multimodal", "", "clip siglip chinese_clip clipseg blip", "both"),
    *_families("multimodal", "", "visual_bert flava lxmert", "both"),
    *_families("multimodal", "_FOR_IMAGE_TEXT_TO_TEXT", "llava qwen2_vl qwen2_5_vl paligemma git", "both"),
    *_families("multimodal, text only", "_FOR_CAUSAL_LM", "mllama moshi"),
    *_families("other", "", "patchtst patchtsmixer time_series_transformer decision_transformer"),
]
