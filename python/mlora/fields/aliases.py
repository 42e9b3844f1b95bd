"""Names that other tools give to keys of a config, so that an error can say what the key is called here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

NAMES = {
    "base_model": "model model_name model_name_or_path model_path model_id base pretrained_model "
    "base_model_name_or_path pretrained_model_name_or_path",
    "output_dir": "output out out_dir output_path output_folder save_dir save_path run_dir",
    "datasets": "data dataset_dir train_data",
    "dataset": "data train_dataset",
    "path": "file data_path data_files file_name dataset_path",
    "name": "adapter_name dataset_name id",
    "format": "type dataset_type data_format",
    "eval_dataset": "val_dataset validation_dataset test_dataset",
    "lora": "lora_config peft peft_config",
    "init_from": "adapter_path resume_from lora_model_dir",
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
    "weight_decay": "wd",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps epsilon adam_eps",
    "max_grad_norm": "max_norm clip clip_grad grad_clip gradient_clipping gradient_clip_val grad_norm",
    "optim": "optimizer",
    "early_stopping_patience": "patience early_stopping",
    "eval_steps": "eval_every eval_interval eval_freq",
    "logging_steps": "log_steps log_every log_interval logging_interval",
    "save_steps": "save_every save_interval checkpoint_every checkpoint_interval",
    "assistant_only_loss": "train_on_completions_only completion_only_loss",
    "gradient_checkpointing": "activation_checkpointing",
    "save_total_limit": "keep_last max_checkpoints",
    "bf16": "bfloat16",
    "fp16": "float16",
    "stages": "num_stages pp pipeline_parallel_size",
    "micro_batches": "num_micro_batches microbatches",
    "memory_limit": "limit memory max_memory",
    "trials": "n_trials num_trials",
    "low": "min",
    "high": "max",
    "choice": "values choices options categorical",
}
"""What else the key is called, by its name here."""


def known_as(word: str, words: Sequence[str]) -> str | None:
    """Return the word that another tool calls so, if it is among those that are known."""
    plain = word.lower().replace("-", "_")
    return next((key for key, aliases in NAMES.items() if plain in aliases.split() and key in words), None)


def spelt_alike(word: str, words: Sequence[str], alike: float = 0.6) -> str | None:
    """Return the known word that is spelt most alike, if one is alike enough."""
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=alike)), None)


def nearest(word: str, words: Sequence[str], what: str = "known keys") -> str:
    """Return the end of an error line: the word that was probably meant, or all that are known.

    Args:
        word: what came.
        words: what is known.
        what: what they are.

    Returns:
        ``did you mean 'r'?`` or ``known keys: ...``.
    """
    found = known_as(word, words) or spelt_alike(word, words)
    return f"did you mean {found!r}?" if found else f"{what}: {', '.join(words)}"
