"""Reading YAML, and `--set key=value`."""

from pathlib import Path

import pytest
from mlora.config.config_file import apply_override, load_config, read_yaml
from mlora.errors import RunError

from tests.mlora.config.faulty import write


def test_yaml_reads_exponents_and_refuses_a_key_twice(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 2e-4\nb: 1.5e3\n")
    assert read_yaml(path) == {"a": 2e-4, "b": 1500.0}
    path.write_text("a: 1\nb: 2\na: 3\n")
    with pytest.raises(RunError, match=r"x\.yaml:3: the key 'a' is given twice"):
        read_yaml(path)
    path.write_text("a: [1\n")
    with pytest.raises(RunError, match=r"x\.yaml:2: "):
        read_yaml(path)
    with pytest.raises(RunError, match=r"none\.yaml: cannot be read: No such file"):
        read_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\nname: 2024-13-45", r"x\.yaml:2: 2024-13-45 cannot be read as timestamp; put it in quotes"),
        ("seed: " + "1" * 5000, r"x\.yaml:1: 1{59}… cannot be read as int"),
        ("seed: !!bool maybe", r"x\.yaml:1: maybe cannot be read as bool"),
        ("seed: !!map 3", r"x\.yaml:1: expected a mapping node"),
        ("seed: " + "[" * 2000, r"x\.yaml: brackets are nested too deeply"),
    ],
)
def test_values_that_yaml_cannot_read_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(RunError, match=expected):
        read_yaml(path)


def test_overrides_reach_keys_indices_and_names(base: dict) -> None:
    assert apply_override(base, "adapters.b.learning_rate=1e-3") == ("adapters", 1, "learning_rate")
    assert apply_override(base, "adapters.0.lora.r=9") == ("adapters", 0, "lora", "r")
    assert apply_override(base, "adapters[1].lora.r=3") == ("adapters", 1, "lora", "r")
    apply_override(base, "scheduler.memory_limit=null")
    apply_override(base, "datasets[0]={name: e}")
    apply_override(base, "seed=7")
    assert base["adapters"][1]["learning_rate"] == 1e-3
    assert [adapter["lora"]["r"] for adapter in base["adapters"]] == [9, 3]
    assert base["scheduler"] == {"memory_limit": None}
    assert base["datasets"] == [{"name": "e"}]
    assert base["seed"] == 7


def test_a_misspelt_item_leads_to_the_nearest(base: dict) -> None:
    base["adapters"][0]["name"] = "sums"
    with pytest.raises(RunError, match=r"no item is named 'smus'; did you mean 'sums'\?$"):
        apply_override(base, "adapters.smus.learning_rate=1")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("adapters.c.learning_rate=1", "no item is named 'c'; items: a, b, or 0 to 1"),
        ("adapters.2.learning_rate=1", "no item is named '2'"),
        ("adapters.².learning_rate=1", "no item is named '²'"),
        ("seed=2024-13-45", "is not YAML: 2024-13-45 cannot be read as timestamp"),
        ("seed", "must be key=value"),
        ("base_model.x=1", "base_model is 'model' and has no key 'x'"),
        ("adapters[2].learning_rate=1", "no item is named '2'"),
        ("seed=[1", r"--set seed=\[1: '\[1' is not YAML: expected ',' or '\]'"),
    ],
)
def test_overrides_that_lead_nowhere_are_refused(base: dict, override: str, expected: str) -> None:
    with pytest.raises(RunError, match=expected):
        apply_override(base, override)


def test_faults_of_an_override_name_it(tmp_path: Path, base: dict) -> None:
    overrides = ["adapters.b.lora.r=0", "defaults.max_steps=many", "adapters[0].lora.rank_pattern.q_proj=x"]
    with pytest.raises(RunError) as error:
        load_config(write(tmp_path, base | {"sede": 1}), overrides)
    assert sorted(str(error.value).splitlines()) == [
        "--set adapters.b.lora.r=0: adapters.b.lora.r: must be at least 1, got 0",
        "--set adapters[0].lora.rank_pattern.q_proj=x: adapters.a.lora.rank_pattern.q_proj: must be a whole "
        "number, got 'x'",
        "--set defaults.max_steps=many: defaults.max_steps: must be a whole number, got 'many'",
        f"{tmp_path}/run.yaml: sede: unknown key; did you mean 'seed'?",
    ]
