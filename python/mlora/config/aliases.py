"""Other tools' names for config keys, so that an error can say what the key is called here."""

from __future__ import annotations

from collections.abc import Sequence

from mlora.errors import spelt_alike

NAMES = {
    key: names.split()
    for key, names in {
        "base_model": "model model_name model_name_or_path model_path model_id base pretrained_model "
        "base_model_name_or_path pretrained_model_name_or_path",
        "output_dir": "output out out_dir output_path output_folder save_dir save_path run_dir",
        "datasets": "data dataset_dir train_data",
        "dataset": "data train_dataset train_path train_file",
        "path": "file hf_hub_url data_path data_files file_name dataset_name dataset_path",
        "name": "adapter_name id",
        "format": "type dataset_type data_format ranking",
        "eval_dataset": "val_dataset validation_dataset test_dataset test_datasets eval_file val_file "
        "validation_file",
        "validation_split": "val_set_size val_size val_split test_size test_split_size eval_split",
        "split": "dataset_split dataset_train_split train_split train_on_split",
        "subset": "config_name dataset_config dataset_config_name subset_name",
        "columns": "column_mapping column_map rename_columns text_column text_field dataset_text_field "
        "field field_messages field_instruction field_input field_output field_prompt field_chosen "
        "field_rejected field_completion field_label message_property_mappings",
        "chat_template": "template chat_template_path chat_template_jinja",
        "shuffle": "shuffle_dataset shuffle_merged_datasets disable_shuffling",
        "data_cache": "dataset_prepared_path tokenized_path",
        "dataset_num_proc": "dataset_processes preprocessing_num_workers num_proc num_workers",
        "max_samples": "num_samples max_train_samples samples take",
        "lora": "lora_config peft peft_config",
        "init_from": "adapter_path adapter_name_or_path resume_from lora_model_dir",
        "method": "finetuning_type",
        "objective": "rl pref_loss",
        "label_names": "id2label class_names",
        "r": "rank lora_r lora_rank lora_dim",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "target_modules": "targets target lora_target lora_target_modules modules",
        "target_parameters": "lora_target_parameters",
        "modules_to_save": "lora_modules_to_save additional_target",
        "use_rslora": "rslora rs_lora peft_use_rslora",
        "use_dora": "dora peft_use_dora",
        "rank_pattern": "lora_rank_pattern",
        "alpha_pattern": "lora_alpha_pattern",
        "fan_in_fan_out": "lora_fan_in_fan_out",
        "init_lora_weights": "peft_init_lora_weights pissa_init",
        "layers_to_transform": "peft_layers_to_transform",
        "layers_pattern": "peft_layers_pattern",
        "trainable_token_indices": "peft_trainable_token_indices",
        "ensure_weight_tying": "peft_ensure_weight_tying",
        "task_type": "lora_task_type",
        "learning_rate": "lr",
        "lr_scheduler_type": "lr_scheduler scheduler_type lr_schedule",
        "per_device_train_batch_size": "batch_size train_batch_size micro_batch_size batch bs",
        "per_device_eval_batch_size": "eval_batch_size val_batch_size",
        "gradient_accumulation_steps": "grad_accum grad_accumulation grad_accum_steps accumulation_steps "
        "gradient_accumulation grad_acc_steps accumulate_grad_batches iters_to_accumulate",
        "num_train_epochs": "epochs epoch num_epochs n_epochs max_epochs train_epochs",
        "max_steps": "steps num_steps total_steps train_steps max_train_steps iters",
        "warmup_steps": "warmup warmup_ratio num_warmup_steps lr_warmup_steps",
        "max_length": "seq_len seq_length max_seq_length max_seq_len sequence_len sequence_length cutoff_len "
        "block_size context_length model_max_length",
        "weight_decay": "wd loraplus_weight_decay",
        "loraplus_lr_ratio": "loraplus lora_plus loraplus_ratio lr_ratio",
        "adam_beta1": "beta1",
        "adam_beta2": "beta2",
        "adam_epsilon": "eps epsilon adam_eps",
        "max_grad_norm": "max_norm clip clip_grad grad_clip gradient_clipping gradient_clip_val grad_norm",
        "optim": "optimizer",
        "early_stopping_patience": "patience early_stopping early_stopping_steps",
        "early_stopping_threshold": "early_stopping_min_delta min_delta early_stopping_delta",
        "load_best_model_at_end": "save_best load_best keep_best save_best_model",
        "eval_steps": "eval_every eval_interval eval_freq eval_strategy evaluation_strategy",
        "logging_steps": "log_steps log_every log_interval logging_interval logging_strategy",
        "save_steps": "save_every save_interval checkpoint_every checkpoint_interval save_strategy",
        "report_to": "tracker trackers logger loggers log_with use_wandb use_tensorboard "
        "use_mlflow use_trackio",
        "run_name": "wandb_name wandb_run_name mlflow_run_name swanlab_run_name",
        "project": "wandb_project mlflow_experiment_name trackio_project project_name",
        "logging_dir": "log_dir tensorboard_dir tensorboard_log_dir",
        "callbacks": "callback trainer_callbacks",
        "assistant_only_loss": "train_on_completions_only train_on_responses_only roles_to_train",
        "gradient_checkpointing": "activation_checkpointing",
        "save_total_limit": "keep_last max_checkpoints",
        "quantization": "quantization_config quantize quant bnb_config quantization_bit "
        "quantization_method load_in_4bit load_in_8bit",
        "double_quant": "bnb_4bit_use_double_quant use_double_quant use_bnb_nested_quant double_quantization",
        "compute_dtype": "bnb_4bit_compute_dtype",
        "group_size": "q_group_size groupsize",
        "bf16": "bfloat16",
        "fp16": "float16",
        "stages": "num_stages pp pipeline_parallel_size",
        "micro_batches": "num_micro_batches microbatches",
        "memory_limit": "limit memory max_memory",
        "trials": "n_trials num_trials",
        "low": "min",
        "high": "max",
        "choice": "values choices options categorical",
    }.items()
}
"""Names of a key in other tools, by the key's name here."""

VALUES = {
    "report_to": {"tb": "tensorboard", "wb": "wandb", "weights_and_biases": "wandb", "w&b": "wandb"},
    "optim": {"adamw": "adamw_torch", "adam": "adamw_torch", "adamw_hf": "adamw_torch"},
    "format": {
        **dict.fromkeys(("chat", "chatml", "openai"), "messages"),
        "conversations": "sharegpt",
        **dict.fromkeys(("dpo", "cpo", "simpo", "orpo"), "preference"),
        "kto": "unpaired",
    },
}
"""Values by their names in other tools, for each key that has such."""

OPTIONS = {
    "dpo_label_smoothing": "label_smoothing",
    "dpo_loss_type": "loss_type",
    "kto_chosen_weight": "desirable_weight",
    "kto_desirable_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "pref_beta": "beta",
    "rl_beta": "beta",
}
"""Options of objectives, by their names in other tools."""

_ATTENTION = "the run has its own attention over packed rows; remove this key"
_COMMAND = "the command says what is done: `mlora train`, `mlora evaluate`; remove this key"
_COMPLETIONS = "completions are always trained without their prompts; remove this key, or use format text"
_CUT = "samples longer than max_length are cut at their end, and a warning counts them; remove this key"
_DTYPE = "write `bf16: true` or `fp16: true` at the top level of the config; without them it is float32"
_FOLDER = "it is read from the base model's folder; remove this key"
_HUB = "write the adapter with `mlora export`, then upload its folder with `hf upload`"
_PACKED = "samples are always packed, without padding; remove this key"
_RESUME = "remove this key, and continue the run with `mlora resume RUN_DIR`"
_SEVERAL_DEVICES = "remove this key; `mlora train --stages N` cuts the model over N devices"
_TOKENISED = "large data is tokenised once and kept in data_cache; remove this key"
_TOKENS = (
    "save the tokenizer with them in the base model's folder; an adapter trains their rows "
    "with lora: {trainable_token_indices: ...}"
)
_TYPE = "write `quantization: {method: bnb-nf4}` or `bnb-fp4` at the top level of the config"
HINTS = {
    "activation_offloading": "write offload: {activations: swap}, or gradient_checkpointing: true",
    "layer_offloading": "write offload: {base: disk}",
    "adapter": "list adapters under adapters, each with its lora; that of a sweep belongs under sweep",
    "cosine_min_lr_ratio": "write cosine_with_min_lr, with lr_scheduler_kwargs: {min_lr_rate: ...}",
    "dataset_test_split": "add an entry of datasets with split: test, and name it as eval_dataset",
    "ds_type": "a file's content tells what kind of file it is; remove this key",
    "evals_per_epoch": "write eval_steps; below 1 it is a share of all steps: 1 / (epochs * evals_per_epoch)",
    "lora_target_linear": "write target_modules: all-linear in the adapter's lora",
    "model_revision": "download that revision of the base model, and name its folder as base_model",
    "orpo_alpha": "it is beta of objective: {name: orpo, beta: ...}",
    "overwrite_output_dir": "remove this key, and use `mlora train --overwrite`",
    "plot_loss": "every run writes loss.png; remove this key",
    "saves_per_epoch": "write save_steps; below 1 it is a share of all steps: 1 / (epochs * saves_per_epoch)",
    "stage": "the loss is an adapter's objective, such as dpo; to cut the model, pipeline: {stages: ...}",
    "trust_remote_code": "it is not supported; base models are Transformers' own classes",
    "use_peft": "an adapter with a lora block is LoRA; remove this key",
    "wandb_entity": "it is a setting of wandb: WANDB_ENTITY in the environment",
    "weight": "it stands beside one of several paths: path: [one.jsonl, {path: two.jsonl, weight: 2}]",
    **dict.fromkeys(("bnb_4bit_quant_type", "quantization_type"), _TYPE),
    **dict.fromkeys(("do_eval", "do_predict", "do_train"), _COMMAND),
    **dict.fromkeys(("completion_only_loss", "train_on_inputs", "train_on_prompt"), _COMPLETIONS),
    **dict.fromkeys(("auto_resume_from_checkpoints", "resume_from_checkpoint"), _RESUME),
    **dict.fromkeys(("deepspeed", "fsdp"), _SEVERAL_DEVICES),
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    **dict.fromkeys(("excess_length_strategy", "truncation_mode"), _CUT),
    **dict.fromkeys(("hub_model_id", "push_to_hub"), _HUB),
    **dict.fromkeys(("model_type", "processor_type", "tokenizer_type"), _FOLDER),
    **dict.fromkeys(
        (
            "attn_implementation",
            "eager_attention",
            "flash_attention",
            "flash_attn",
            "flex_attention",
            "sdp_attention",
            "shift_attn",
            "xformers_attention",
        ),
        _ATTENTION,
    ),
    "overwrite_cache": _TOKENISED,
    **dict.fromkeys(("add_special_tokens", "add_tokens", "special_tokens", "tokens"), _TOKENS),
    **dict.fromkeys(
        (
            "eval_packing",
            "eval_sample_packing",
            "group_by_length",
            "neat_packing",
            "packing",
            "packing_strategy",
            "pad_to_multiple_of",
            "pad_to_sequence_len",
            "pad_token",
            "padding_free",
            "sample_packing",
        ),
        _PACKED,
    ),
}
"""Hints for keys of other tools that are other keys here, or none."""

UNSUPPORTED = {
    key
    for keys in (
        "accelerator_config activation_checkpointing_kwargs auto_find_batch_size",
        "average_tokens_across_devices batch_eval_metrics bf16_full_eval data_seed dataloader_drop_last",
        "dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers",
        "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend",
        "ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout",
        "debug disable_tqdm enable_jit_checkpoint",
        "eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_use_gather_object",
        "fp16_full_eval fsdp_config full_determinism gradient_checkpointing_kwargs hub_always_push",
        "hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip",
        "include_for_metrics include_num_input_tokens_seen label_smoothing_factor",
        "length_column_name liger_kernel_config local_rank log_level log_level_replica log_on_each_node",
        "logging_first_step logging_nan_inf_filter neftune_noise_alpha optim_args optim_target_modules",
        "parallelism_config prediction_loss_only remove_unused_columns",
        "restore_callback_states_from_checkpoint save_on_each_node",
        "save_only_model skip_memory_metrics tf32 torch_compile torch_compile_backend torch_compile_mode",
        "torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id",
        "train_sampling_strategy use_cache use_cpu use_liger_kernel",
    )
    for key in keys.split()
}
"""Keys of Transformers' `TrainingArguments` that have no counterpart here."""


def known_as(word: str, words: Sequence[str]) -> str | None:
    """Returns the word of `words` that another tool calls `word`, or None."""
    plain = word.lower().replace("-", "_")
    return next((key for key, aliases in NAMES.items() if plain in aliases and key in words), None)


def nearest(word: str, words: Sequence[str], what: str = "known keys") -> str:
    """Returns the end of an error line: ``did you mean 'r'?``, or ``known keys: ...`` with all `words`."""
    found = known_as(word, words) or spelt_alike(word, words)
    return f"did you mean {found!r}?" if found else f"{what}: {', '.join(words)}"
