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
        "path": "file data_path data_files file_name dataset_path",
        "name": "adapter_name dataset_name id",
        "format": "type dataset_type data_format ranking",
        "eval_dataset": "val_dataset validation_dataset test_dataset eval_file val_file validation_file",
        "validation_split": "val_set_size val_size val_split test_size eval_split",
        "split": "dataset_split train_split train_on_split",
        "subset": "config_name dataset_config dataset_config_name subset_name",
        "columns": "column_mapping column_map rename_columns text_column text_field dataset_text_field "
        "field_messages field_instruction field_input field_output message_property_mappings",
        "data_cache": "dataset_prepared_path tokenized_path",
        "max_samples": "num_samples max_train_samples samples take",
        "lora": "lora_config peft peft_config",
        "init_from": "adapter_path resume_from lora_model_dir",
        "label_names": "id2label class_names",
        "r": "rank lora_r lora_rank lora_dim",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "target_modules": "targets target lora_target lora_target_modules modules",
        "use_rslora": "rslora rs_lora",
        "use_dora": "dora",
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
        "early_stopping_patience": "patience early_stopping",
        "early_stopping_threshold": "early_stopping_min_delta min_delta early_stopping_delta",
        "load_best_model_at_end": "save_best load_best keep_best save_best_model",
        "eval_steps": "eval_every eval_interval eval_freq eval_strategy evaluation_strategy",
        "logging_steps": "log_steps log_every log_interval logging_interval logging_strategy",
        "save_steps": "save_every save_interval checkpoint_every checkpoint_interval save_strategy",
        "report_to": "tracker trackers logger loggers log_with use_wandb use_tensorboard",
        "run_name": "wandb_name wandb_run_name mlflow_run_name swanlab_run_name",
        "project": "wandb_project mlflow_experiment_name trackio_project project_name",
        "logging_dir": "log_dir tensorboard_dir tensorboard_log_dir",
        "callbacks": "callback trainer_callbacks",
        "assistant_only_loss": "train_on_completions_only train_on_responses_only roles_to_train",
        "gradient_checkpointing": "activation_checkpointing",
        "save_total_limit": "keep_last max_checkpoints",
        "quantization": "quantization_config quantize quant bnb_config load_in_4bit load_in_8bit",
        "double_quant": "bnb_4bit_use_double_quant use_double_quant double_quantization",
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

_ATTENTION = "the run has its own attention over packed rows; remove this key"
_COMPLETIONS = "completions are always trained without their prompts; remove this key, or use format text"
_DTYPE = "write `bf16: true` or `fp16: true` at the top level of the config; without them it is float32"
_PACKED = "samples are always packed, without padding; remove this key"
_SEVERAL_DEVICES = "remove this key; `mlora train --stages N` cuts the model over N devices"
HINTS = {
    "adapter": "list adapters under adapters, each with its lora; that of a sweep belongs under sweep",
    "attn_implementation": _ATTENTION,
    "completion_only_loss": _COMPLETIONS,
    "deepspeed": _SEVERAL_DEVICES,
    "ds_type": "a file's content tells what kind of file it is; remove this key",
    "dtype": _DTYPE,
    "flash_attention": _ATTENTION,
    "fsdp": _SEVERAL_DEVICES,
    "group_by_length": _PACKED,
    "lora_target_linear": "write `target_modules: all-linear` under an adapter's lora",
    "packing": _PACKED,
    "pad_to_sequence_len": _PACKED,
    "resume_from_checkpoint": "remove this key; `mlora resume OUTPUT_DIR` continues a run",
    "sample_packing": _PACKED,
    "sdp_attention": _ATTENTION,
    "special_tokens": "save the tokenizer with them in the base model's folder; an adapter trains their rows "
    "with lora: {trainable_token_indices: ...}",
    "torch_dtype": _DTYPE,
    "train_on_inputs": _COMPLETIONS,
    "trust_remote_code": "it is not supported; base models are Transformers' own classes",
    "weight": "it stands beside one of several paths: path: [one.jsonl, {path: two.jsonl, weight: 2}]",
    "xformers_attention": _ATTENTION,
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
        "debug disable_tqdm do_eval do_predict do_train enable_jit_checkpoint",
        "eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_use_gather_object",
        "fp16_full_eval fsdp_config full_determinism gradient_checkpointing_kwargs hub_always_push",
        "hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip",
        "include_for_metrics include_num_input_tokens_seen label_smoothing_factor",
        "length_column_name liger_kernel_config local_rank log_level log_level_replica log_on_each_node",
        "logging_first_step logging_nan_inf_filter neftune_noise_alpha optim_args optim_target_modules",
        "parallelism_config prediction_loss_only push_to_hub remove_unused_columns",
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
