"""What Transformers' callbacks see of an adapter: its `TrainingArguments` and `TrainerState`."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from mlora.config.run_config import RunConfig
from mlora.tasks.task import Task


class AdapterArguments(TrainingArguments):
    """`TrainingArguments` that set up no devices: the run has done so."""

    distributed_state = None
    _n_gpu = 1
    _setup_devices = torch.device("cpu")


def arguments_of(task: Task, config: RunConfig, device: str) -> TrainingArguments:
    """Returns an adapter's arguments as ``Trainer`` would have them.

    ``output_dir`` is the folder in which the adapter is saved when it ends. Values are set without the checks
    of Transformers, which are about what ``Trainer`` can do.
    """
    own, rule = task.config, task.config.best_rule
    args = AdapterArguments(f"{config.output_dir}/adapters/{task.name}", report_to="none")
    names = {field.name for field in fields(TrainingArguments)}
    values: dict[str, Any] = {
        key: int(value) if key.endswith("_steps") and value >= 1 else value
        for key, value in own.model_dump().items()
        if key in names and value is not None
    }
    evaluates = own.eval_dataset is not None
    steps = IntervalStrategy.STEPS if evaluates and own.eval_steps else IntervalStrategy.NO
    values |= {
        "seed": task.seed,
        "lr_scheduler_type": SchedulerType(own.lr_scheduler_type),
        "optim": OptimizerNames(own.optim) if own.optim in set(OptimizerNames) else own.optim,
        "eval_strategy": steps,
        "eval_on_start": evaluates,
        "do_train": True,
        "do_eval": evaluates,
        "save_strategy": SaveStrategy.STEPS if own.save_steps else SaveStrategy.NO,
        "save_total_limit": config.save_total_limit,
        "restore_callback_states_from_checkpoint": True,
        "load_best_model_at_end": rule is not None and rule.loads,
        "metric_for_best_model": None if rule is None else own.metric_for_best_model or "loss",
        "greater_is_better": None if rule is None else rule.greater,
        "run_name": task.name,
        "bf16": config.bf16,
        "fp16": config.fp16,
        "gradient_checkpointing": config.gradient_checkpointing,
        "activation_checkpointing": config.gradient_checkpointing,
        "use_cpu": device == "cpu",
        "disable_tqdm": True,
        "_setup_devices": torch.device(device),
    }
    if config.project is not None:
        values["project"] = config.project
    for key, value in values.items():
        setattr(args, key, value)
    return args


def state_of(task: Task, args: TrainingArguments) -> TrainerState:
    """Returns the state of an adapter before its first step."""
    state = TrainerState(
        max_steps=task.total_steps,
        num_train_epochs=math.ceil(task.total_steps / max(1, task.plan.steps_of(1))),
        train_batch_size=task.config.per_device_train_batch_size,
    )
    state.compute_steps(args, task.total_steps)
    return state
