"""The example of a pipeline with one's own modules trains as one module does."""

import copy
import runpy

import own_pipeline
import pytest
import torch
from torch import nn


@pytest.mark.parametrize("schedule", ["lorapp", "1f1b", "gpipe"])
def test_it_trains_as_one_module(schedule: str) -> None:
    torch.manual_seed(1)
    stages = own_pipeline.make_stages(4)
    whole = nn.Sequential(*copy.deepcopy(stages))
    torch.manual_seed(2)
    losses = own_pipeline.train(stages, 30, 3, schedule)
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(30):
        reports = []
        for _ in range(3):
            x = torch.randn(64, 4)
            loss, report = own_pipeline.loss_fn(whole(x), x.sum(dim=1, keepdim=True).sin())
            loss.backward()
            reports.append(report)
        optimizer.step()
        optimizer.zero_grad()
        assert losses[step] == pytest.approx(sum(reports) / 3, rel=1e-5)
    assert losses[-1] < losses[0]


def test_the_script_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [own_pipeline.__file__, "--steps", "5"])
    runpy.run_path(own_pipeline.__file__, run_name="__main__")
    assert capsys.readouterr().out.startswith("loss ")
