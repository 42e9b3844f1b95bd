"""Decoders that `Engine` and `mlora train` refuse, by the reason that the page of models gives."""

OTHER_LAYERS = "layers without attention, such as state spaces and linear attention"
OWN_ATTENTION = "an attention that Transformers' `AttentionInterface` does not reach"
NOT_PACKED = "an attention that cannot run packed rows"
OTHER_HEAD = "logits that are not a linear head over the body"

REFUSED = {
    OTHER_LAYERS: [
        "BambaForCausalLM",
        "FalconH1ForCausalLM",
        "FalconMambaForCausalLM",
        "JambaForCausalLM",
        "MambaForCausalLM",
        "Mamba2ForCausalLM",
        "MiniMaxForCausalLM",
        "Qwen3NextForCausalLM",
        "RecurrentGemmaForCausalLM",
        "ZayaForCausalLM",
    ],
    OWN_ATTENTION: [
        "BloomForCausalLM",
        "GPTNeoForCausalLM",
        "OpenAIGPTLMHeadModel",
        "RwkvForCausalLM",
        "XGLMForCausalLM",
        "XLNetLMHeadModel",
    ],
    NOT_PACKED: [
        "DogeForCausalLM",
        "FalconForCausalLM",
        "MptForCausalLM",
        "NemotronForCausalLM",
        "StableLmForCausalLM",
    ],
    OTHER_HEAD: ["Llama4ForCausalLM", "xLSTMForCausalLM"],
}
"""Classes by reason."""

SAYS = {
    OTHER_LAYERS: "has layers of type",
    OWN_ATTENTION: "does not use Transformers' AttentionInterface",
    NOT_PACKED: "cannot be packed|cannot run packed rows",
    OTHER_HEAD: "not a causal language model with a body and a head|unknown step after the head",
}
"""What the error says, by reason."""
