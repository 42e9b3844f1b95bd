"""`mlora.train` from Python: what it takes, and what it says of what it does not take."""

from pathlib import Path
from typing import Any

import mlora
import pytest
from mlora.config.adapter_config import AdapterConfig
from mlora.config.training_fields import TrainingFields
from mlora.errors import RunError
from tiny_run import run_data, weights, write_run


@pytest.fixture
def values(tiny_base: Path, tmp_path: Path) -> dict[str, Any]:
    """A run of two adapters, three steps each."""
    data = run_data(tiny_base, tmp_path)
    for dataset in data["datasets"]:
        dataset["path"] = str(tmp_path / dataset["path"])
    data["adapters"][1].pop("max_steps")
    return data | {"defaults": {"max_steps": 3, "learning_rate": 5e-3}}


def test_a_config_that_is_built_in_python_trains_as_its_yaml(values: dict[str, Any], tmp_path: Path) -> None:
    by_path = mlora.train(write_run(tmp_path, values | {"output_dir": str(tmp_path / "by-path")}))
    config = mlora.RunConfig(**values | {"output_dir": str(tmp_path / "by-config")})
    by_config = mlora.train(config)
    assert by_config.status == by_path.status == "finished"
    assert {name: adapter.step for name, adapter in by_config.adapters.items()} == {"first": 3, "second": 3}
    found = weights(tmp_path / "by-config")
    assert found.keys() == {"first", "second"}
    assert found == weights(tmp_path / "by-path")


def test_a_path_may_be_text(values: dict[str, Any], tmp_path: Path) -> None:
    assert mlora.train(str(write_run(tmp_path, values))).status == "finished"


def test_paths_of_a_config_resolve_where_the_process_is(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = mlora.RunConfig(**values | {"output_dir": "run"})
    assert config.output_dir == str(tmp_path / "run")


def test_defaults_and_adapters_may_be_objects(values: dict[str, Any]) -> None:
    adapters = [AdapterConfig(**fields) for fields in values["adapters"]]
    config = mlora.RunConfig(
        **values | {"defaults": TrainingFields(**values["defaults"]), "adapters": adapters}
    )
    assert config == mlora.RunConfig(**values)
    assert [adapter.max_steps for adapter in config.adapters] == [3, 3]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"base_model": "x"}, "got dict; make one of it: RunConfig.model_validate(values)"),
        (None, "expected a RunConfig or the path of a YAML file, got NoneType"),
        (3, "got int"),
        (["run.yaml"], "got list"),
        (b"run.yaml", "got bytes"),
        (mlora.RunConfig, "got ModelMetaclass"),
    ],
)
def test_what_is_no_config_is_a_type_error(given: Any, expected: str) -> None:
    with pytest.raises(TypeError) as error:
        mlora.train(given)
    assert str(error.value).endswith(expected)


def test_a_path_that_is_wrong_is_a_run_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"none\.yaml: cannot be read: No such file or directory"):
        mlora.train(tmp_path / "none.yaml")
    with pytest.raises(RunError, match="is a folder; expected a YAML file"):
        mlora.train(str(tmp_path))
