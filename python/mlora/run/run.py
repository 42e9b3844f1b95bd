"""Trains all adapters of a config in one run, from the start or from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlora.cluster.signals import ending_signals
from mlora.config.config_file import load_config
from mlora.config.run_config import RunConfig
from mlora.errors import RunError
from mlora.run.callbacks import Callbacks
from mlora.run.decisions import journaled
from mlora.run.environment import note_start
from mlora.run.loop import TrainingLoop
from mlora.run.prepare import Prepared, prepare
from mlora.run.reporter import Reporter, Reporters
from mlora.run.resumed import came_before, continue_longer, finished_result, lost_of
from mlora.run.resumed_config import changed_lines, resumed_config
from mlora.run.stages import Member, check_replicas
from mlora.run.trackers.tracked_runs import TrackedRuns
from mlora.run.trackers.tracker import Tracker
from mlora.run.trackers.tracking import Tracking, open_trackers
from mlora.simulate.trace_file import SPANS, TraceFiles
from mlora.store.checkpoint import load_checkpoint
from mlora.store.checkpoint_writer import CheckpointWriter
from mlora.store.loss_plot import plot_losses
from mlora.store.queue import TaskQueue
from mlora.store.run_folder import Metrics, RunFolder, read_metrics
from mlora.store.samples import cut_samples
from mlora.sweep.outcome import write_outcome
from mlora.tasks.result import RunResult


def train(
    config: RunConfig | Path | str,
    *,
    overwrite: bool = False,
    reporter: Reporter | None = None,
    member: Member | None = None,
    trace: bool = False,
    callbacks: Sequence[Any] = (),
) -> RunResult:
    """Trains every adapter of a config together.

    An adapter is refused if its data or ``lora`` block is wrong, and stopped if its loss is not a number. The
    other adapters go on.

    Args:
        config: a resolved config, or the path of a run's YAML file.
        overwrite: replace an earlier run in ``output_dir``.
        reporter: receives the run's events; by default nothing is reported.
        member: this process's part in a pipeline over processes; this process must be stage 0.
        trace: write what each stage did and when: ``trace.json`` for Perfetto, and ``times.json``,
            which ``mlora simulate --times`` reads.
        callbacks: Transformers' ``TrainerCallback``s, which run for each adapter: classes, functions of an
            adapter's name that return a callback, several or None, or instances, which are copied.

    Returns:
        The result of each adapter.

    Raises:
        RunError: the config, the base model or the output folder is wrong, every adapter was refused, memory
            ran out, or a file cannot be written.
        TypeError: ``config`` is neither a `RunConfig` nor a path, or `callbacks` holds no callback.

    Example:
        >>> result = train("run.yaml")
        >>> result.adapters["sums-r8"].eval_loss
        {'before': 3.1, 'after': 0.2}
    """
    config = _read(config)
    check_replicas(config, member)
    reporter = reporter or Reporter()
    folder = RunFolder(config.output_dir)
    folder.check_free(overwrite=overwrite, inputs=config.inputs)
    own = Callbacks(config, callbacks, reporter)
    for adapter in config.adapters:
        own.make(adapter.name, adapter.callbacks)
    prepared = _measured(prepare(config, reporter, member=member, trace=SPANS if trace else 0))
    with prepared.engine, folder.take(reporter.warn) as metrics:
        trackers = open_trackers(prepared.config, folder.logs)
        # another run may have begun and ended while this one was loaded
        folder.check_contents(overwrite=overwrite, inputs=config.inputs)
        folder.clear()
        metrics.cut(0)
        folder.write_config(prepared.config)
        with TaskQueue(folder.queue) as queue:
            prepared.decisions.begin(queue, prepared.iteration)
            return _run(prepared, metrics, member, own, trackers, trace=trace)


def _read(config: RunConfig | Path | str) -> RunConfig:
    if isinstance(config, RunConfig):
        return config
    if isinstance(config, str | Path):
        return load_config(config)
    more = "; make one of it: RunConfig.model_validate(values)" if isinstance(config, dict) else ""
    raise TypeError(
        f"config: expected a RunConfig or the path of a YAML file, got {type(config).__name__}{more}"
    )


def _measured(prepared: Prepared) -> Prepared:
    """Stores the partition in the config, so that a resumed or repeated run rounds alike."""
    config, engine = prepared.config, prepared.engine
    if engine.stages > 1:
        pipeline = config.pipeline.model_copy(update={"partition": engine.blocks})
        prepared.config = config.model_copy(update={"pipeline": pipeline})
    return prepared


def resume(
    run_dir: Path | str,
    *,
    reporter: Reporter | None = None,
    member: Member | None = None,
    settings: Sequence[str] = (),
    callbacks: Sequence[Any] = (),
) -> RunResult:
    """Continues a run from its last checkpoint.

    Without a checkpoint the run starts anew. A run that has nothing left to do is only reported.

    Args:
        run_dir: the run's ``output_dir``.
        reporter: receives the run's events; by default nothing is reported.
        member: as for :func:`train`.
        settings: overrides of the run's config, such as ``scheduler.memory_limit=8GiB``. Its ``config.yaml``
            keeps them.
        callbacks: as for :func:`train`; they go on with the states that checkpoints hold.

    Returns:
        The result of each adapter.

    Raises:
        RunError: the folder holds no run, another process is working on the run, its data or its base model
            changed, a key of `settings` may not change, no checkpoint is whole, or for a reason given at
            :func:`train`.
        TypeError: `callbacks` holds no callback.
    """
    reporter = reporter or Reporter()
    folder = RunFolder(Path(run_dir).resolve())
    config = resumed_config(folder, settings)  # before `take`, which creates the folder
    done, left = finished_result(folder, config), folder.left_by_killed()
    if done is None:
        with folder.take(reporter.warn) as metrics:
            done = finished_result(folder, config)  # another process may have finished it meanwhile
            if done is None:
                own = Callbacks(config := resumed_config(folder, settings), callbacks, reporter)
                return _go_on(folder, config, metrics, reporter, member, own)
    paused = [name for name, adapter in done.adapters.items() if adapter.state == "paused"]
    if settings:
        if paused:
            raise RunError(
                f"{folder.path}: only paused tasks remain, so nothing goes on with --set; first "
                f"`mlora unpause {folder.path} {' '.join(paused)}`"
            )
        more = "; a larger max_steps is for adapters that had made all their steps"
        raised = any("max_steps" in setting for setting in settings)
        raise RunError(
            f"{folder.path}: the run has ended, so --set changes nothing; remove it{more if raised else ''}"
        )
    if not paused:
        reporter.note("the run had ended already; nothing is left to train")
    for name, adapter in done.adapters.items():
        if adapter.state in ("stopped", "refused"):
            reporter.fault(f"{name}: {adapter.state}: {adapter.message}")
    sweep = folder.read_config().sweep
    if sweep or left or not folder.plot.is_file():  # the disk was full, or the process killed, at its end
        with folder.take(reporter.warn):
            if left or not folder.plot.is_file():
                names = [name for name, adapter in done.adapters.items() if adapter.state != "refused"]
                plot_losses(folder.plot, names, read_metrics(folder.metrics))
            if sweep:
                write_outcome(folder, sweep)
    return done


def _go_on(
    folder: RunFolder,
    config: RunConfig,
    metrics: Metrics,
    reporter: Reporter,
    member: Member | None,
    callbacks: Callbacks,
) -> RunResult:
    """Continues a run that has something left to do."""
    checkpoint = load_checkpoint(folder.checkpoints, reporter.warn, partial(lost_of, folder, config))
    check_replicas(config, member)
    with TaskQueue(folder.queue) as queue:
        queue.check()
        known: dict[int, dict[str, Any]] | None
        known = journaled(queue, config, checkpoint["iteration"] if checkpoint else -1)
        if checkpoint:
            decided, taken = checkpoint["decisions"], queue.taken_by(checkpoint["iteration"])
            if taken < decided["taken"]:
                reporter.warn(
                    f"{folder.queue}: is new, or older than the checkpoint; later requests are lost"
                )
                decided["taken"] = taken
            if checkpoint.get("samples_bytes") and not folder.samples.exists():
                reporter.warn(f"{folder.samples}: is gone, and with it answers to held-out prompts")
            came = came_before(config, folder, checkpoint, queue)
            for line in changed_lines(checkpoint["config"], config.model_dump()):
                reporter.note(f"{folder.config}: {line}")
            continue_longer(config, folder, checkpoint, reporter)
            reporter.note(
                f"resuming {folder.path} at iteration {checkpoint['iteration']} "
                "(in each, adapters in training take one micro-batch)"
            )
            prepared = prepare(config, reporter, checkpoint, member, came=came)
        else:
            reporter.note(f"{folder.path} has no checkpoint; training starts anew")
            first = known.pop(0, None)
            known = known if first else None
            prepared = prepare(config, reporter, member=member, entry=first)
        with _measured(prepared).engine:
            trackers = open_trackers(prepared.config, folder.logs)
            folder.write_config(prepared.config)
            metrics.cut(checkpoint["metrics_bytes"] if checkpoint else 0)
            cut_samples(folder.samples, checkpoint.get("samples_bytes", 0) if checkpoint else 0)
            prepared.decisions.begin(queue, prepared.iteration, known)
            return _run(prepared, metrics, member, callbacks, trackers)


def _run(
    prepared: Prepared,
    metrics: Metrics,
    member: Member | None,
    callbacks: Callbacks,
    trackers: Mapping[str, Tracker],
    *,
    trace: bool = False,
) -> RunResult:
    folder, lines, engine = prepared.table.folder, prepared.table.reporter, prepared.engine
    for task in prepared.table.alive():
        callbacks.make(task.name, task.config.callbacks)
    told: list[Reporter] = [callbacks]
    if trackers:
        told.append(Tracking(prepared.config, trackers, TrackedRuns(folder.tracking), lines))
    reporter = prepared.table.reporter = Reporters(lines, *told)
    note_start(folder, engine.device, prepared.iteration, prepared.table.builder.warnings)
    writer = CheckpointWriter(folder.checkpoints, prepared.config.save_total_limit, metrics.sync)
    loop = TrainingLoop(prepared, metrics, writer, callbacks)
    if member:
        member.put_right = lines.close
    reporter.start(prepared.table.tasks)
    if not engine.alone:
        times = f"{engine.replicas} pipelines of " if engine.replicas > 1 else ""
        blocks = ", ".join(map(str, engine.blocks))
        groups = prepared.table.admission.count
        reporter.note(f"{times}{engine.stages} stages with {blocks} blocks; groups of adapters: {groups}")
    try:
        with ending_signals() as caught, writer:
            loop.train(caught)
            if trace:
                reporter.note(f"trace: {TraceFiles(*engine.trace(), engine.replicas).write(folder.path)}")
            return loop.finish(caught[0] if caught else None)
    finally:
        reporter.close()
