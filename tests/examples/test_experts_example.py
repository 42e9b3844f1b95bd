"""The example of adapters on experts trains, and PEFT reads its folders."""

from pathlib import Path

import experts


def test_it_trains_and_equals_peft(tmp_path: Path) -> None:
    base = tmp_path / "base"
    experts.save_mixture(base)
    losses = experts.train(base, tmp_path / "run", steps=6)
    for name, found in losses.items():
        assert len(found) == 6
        assert found[-1] < found[0], name
    assert experts.largest_difference(base, tmp_path / "run", "sort dcba = ") < 1e-4
