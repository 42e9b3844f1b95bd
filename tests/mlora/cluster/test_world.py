"""Processes of a pipeline find each other and agree, or are refused in one line."""

import pytest
from mlora.cluster.processes import Process
from mlora.cluster.world import PeerError, World
from torch.distributed import HashStore

from tests.mlora.stages import stages

AGREE = """
try:
    world.agree(facts, {timeout})
    print("agreed")
except (ValueError, PeerError) as error:
    print(type(error).__name__, error)
"""
FACTS = 'facts = {"torch": "2.13.0", "config": {"adapters": [{"r": 8}], "seed": 0}}\n'
LINKS = """
import torch
links = connect_neighbours(world)
def hand_on(source, target):
    token = torch.zeros(1, dtype=torch.uint8)
    if source:
        source.into.receive([token])
    if target:
        target.out.send([token + 1])
    return token.item()
print(hand_on(links.previous, links.next), hand_on(links.next, links.previous))
links.close()
"""


def told(body: str, *changes: str, ranks: list[int] | None = None, timeout: float = 30) -> list[str]:
    bodies = [FACTS + change + body.format(timeout=timeout) for change in changes]
    with stages(*bodies, ranks=ranks) as running:
        codes, outputs, errors = running.end()
        assert codes == [0] * len(codes), errors
        return outputs


def test_process_without_a_launcher_has_no_world() -> None:
    assert World.from_launcher() is None


def test_equal_facts_are_agreed_on() -> None:
    assert told(AGREE, "", "") == ["agreed\n"] * 2


def test_first_difference_is_told_by_the_stage_that_differs() -> None:
    first, second, third = told(AGREE, "", "facts['config']['adapters'][0]['r'] = 16\n", "facts['x'] = 1\n")
    me = Process.this().host
    assert second.startswith(f"ValueError stage 1 (host {me}, pid ")
    assert ") has config.adapters[0].r 16, stage 0 (host " in second
    assert second.endswith(") has 8; all stages need the same\n")
    assert first == third == second.replace("ValueError", "PeerError")


def test_fact_that_only_one_has_is_a_difference() -> None:
    _, second = told(AGREE, "", "facts['more'] = 'x'\n")
    assert "has more x, stage 0 (host " in second
    assert "has nothing;" in second


@pytest.mark.parametrize("rank", [0, 2])
def test_missing_stage_is_named_once(rank: int) -> None:
    """By the first of those that have come."""
    store = HashStore()
    World(2 - rank, 3, 2 - rank, store, Process.this()).publish(f"facts/{2 - rank}", "{}")
    with pytest.raises((ValueError, PeerError), match=r"^stage 1 has not come up within 0.05 s$") as caught:
        World(rank, 3, rank, store, Process.this()).agree({}, 0.05)
    assert caught.type is (PeerError if rank else ValueError)


@pytest.mark.nightly
def test_missing_process_is_named_once() -> None:
    first, second = told(AGREE, "", "", "", ranks=[0, 2], timeout=3)
    assert first == "ValueError stage 1 has not come up within 3 s\n"
    assert second == "PeerError stage 1 has not come up within 3 s\n"


def test_store_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(
        ValueError, match=r"^the launcher's store cannot be reached: [^\n]*127\.0\.0\.1"
    ) as caught:
        World.from_launcher(timeout=0.1)
    assert "\n" not in str(caught.value)


def test_links_pass_messages_both_ways() -> None:
    assert told(LINKS, "", "", "") == ["0 2\n", "1 1\n", "2 0\n"]
