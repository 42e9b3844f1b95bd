"""What is refused before a run's processes start."""

from pathlib import Path
from typing import Any

import pytest
from mlora.config.run_config import RunConfig
from mlora.errors import RunError
from mlora.run.preflight import check_early
from tiny_run import run_data, write_run


def config(base: Path, folder: Path, **pipeline: Any) -> RunConfig:
    data = run_data(base, folder) | {"pipeline": pipeline}
    return RunConfig.model_validate(data, context={"folder": str(folder)})


def test_cuts_that_the_model_has_no_blocks_for(tiny_base: Path, tmp_path: Path) -> None:
    check_early(config(tiny_base, tmp_path, stages=2), overwrite=False)
    with pytest.raises(RunError, match=r"pipeline.stages: is 9, but .* has 2 decoder blocks"):
        check_early(config(tiny_base, tmp_path, stages=9), overwrite=False)
    with pytest.raises(RunError, match=r"pipeline.partition: \[3, 3\] adds up to 6, but .* has 2 decoder"):
        check_early(config(tiny_base, tmp_path, stages=2, partition=[3, 3]), overwrite=False)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"num_hidden_layers": "many"}'])
def test_what_it_cannot_read_is_left_to_the_run(tmp_path: Path, content: str, tiny_base: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(content)
    check_early(config(tmp_path / "base", tmp_path, stages=9), overwrite=False)


def test_a_folder_that_is_not_free(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    with pytest.raises(RunError, match=r"output_dir: .* is not empty"):
        check_early(config(tiny_base, tmp_path, stages=2), overwrite=False)
    check_early(config(tiny_base, tmp_path, stages=2), overwrite=True)


def test_two_numbers_of_stages(run: Any, tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    result = run("train", path, "--stages", 2, "--set", "pipeline.stages=3")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: --stages 2 and --set pipeline.stages=3 differ; give only one of them\n",
    )
