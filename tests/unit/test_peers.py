"""The side-by-side benchmark: where a loss is reached, when hosts go and come, what is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import peers
from arms.lines import user_lines
from arms.rates import RATES, Smoothed
from arms.run import BACK, FIRST, HOSTS, KILLED, changes
from arms.run import SCENARIOS as scenarios
from arms.task import Order, Watch, kept, reported


def test_the_loss_is_reached_between_two_means() -> None:
    smoothed = Smoothed(1.0)
    assert smoothed.add(0.0, 2.0) is None
    assert smoothed.add(10.0, 1.0) is None  # the mean is 1.5
    assert smoothed.add(20.0, 0.6) == pytest.approx(10 + 10 * (1.5 - 1.0) / (1.5 - 0.8))


def test_one_low_loss_does_not_count() -> None:
    smoothed = Smoothed(1.0)
    assert [smoothed.add(at, loss) for at, loss in ((0, 2.0), (1, 0.9), (2, 2.0))] == [None] * 3


def test_hosts_are_killed_in_turn_and_never_the_first() -> None:
    due = changes(scenarios["killed"], 100.0)
    first = [next(due) for _ in range(8)]
    assert first[:2] == [
        (100 + FIRST, "kill", HOSTS - 1),
        (100 + FIRST + BACK, "back", HOSTS - 1),
    ]
    assert first[2][0] == first[0][0] + KILLED
    assert [host for _, what, host in first if what == "kill"] == [3, 2, 1, 3]


def test_a_host_is_added_once() -> None:
    assert list(changes(scenarios["added"], 5.0)) == [(5 + FIRST, "back", HOSTS - 1)]
    assert not list(changes(scenarios["calm"], 5.0))


@pytest.mark.parametrize("arm", peers.ARMS)
def test_every_arm_has_a_function_and_a_rate(arm: str) -> None:
    family, kind = peers.ARMS[arm]
    lines = user_lines(family.module, arm)
    assert lines is not None
    assert 10 < lines < 50
    assert (kind, "cnn") in RATES


def test_models_and_steps_are_found_again(tmp_path: Path) -> None:
    order = Order("ddp", str(tmp_path))
    model = torch.nn.Linear(3, 2)
    watch = Watch(order, speaks=True)
    watch.begin(0, model)
    for step in range(1, 21):
        assert not watch.stepped(step, model)
    assert [step for step, _, _ in kept(tmp_path)] == [0, 10, 20]
    assert [(step, samples) for _, step, samples in reported(tmp_path)] == [
        (step, 512 * step) for step in range(1, 21)
    ]
    (tmp_path / "last").write_text("22")
    assert [watch.stepped(step, model) for step in (21, 22)] == [False, True]


def test_a_silent_process_leaves_no_trace(tmp_path: Path) -> None:
    watch = Watch(Order("ddp", str(tmp_path)), speaks=False)
    watch.begin(0, torch.nn.Linear(3, 2))
    assert not watch.stepped(10, torch.nn.Linear(3, 2))
    assert not list(tmp_path.iterdir())
