"""Under torchrun one driver trains, several are refused, and samplers know their rank early."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.test_ddp import ROOT, launched, torchrun

pytestmark = [pytest.mark.cluster, pytest.mark.long]

DRIVER = """
import paceline as pl
from tests.conftest import make_learner

run = pl.Trainer(make_learner(), pl.sync(), pl.Ray(workers=3), progress=False).fit(steps=2)
print("steps:", run.steps)
"""

EARLY = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from paceline.ddp import ProportionalSampler

sampler = ProportionalSampler(12, batch_size=6)  # before there is a process group
dist.init_process_group("gloo")
assert (sampler.rank, sampler.world_size) == (dist.get_rank(), 2)
loader = DataLoader(torch.arange(12), batch_sampler=sampler)
seen = []
for batch in sampler.measured(loader):
    seen += batch.tolist()
    sampler.scale(torch.tensor(0.0))
everybody = [None, None]
dist.all_gather_object(everybody, seen)
assert sorted(everybody[0] + everybody[1]) == list(range(12)), everybody
if dist.get_rank() == 0:  # lines of two ranks may mix
    print("seen:", [len(each) for each in everybody])
dist.destroy_process_group()
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_one_driver_trains(tmp_path: Path) -> None:
    assert "steps: 2" in torchrun(script(tmp_path, DRIVER), seconds=240, ranks=1)


def test_several_drivers_are_told_to_be_one(tmp_path: Path) -> None:
    code, printed, errors = launched(script(tmp_path, DRIVER), (), 240, 2)
    assert code != 0 and "steps:" not in printed
    assert "RuntimeError: torchrun started this script 2 times (this is RANK=" in errors
    assert "with plain python, and use pl.Ray(workers=2)" in errors


def test_a_sampler_may_be_made_before_the_process_group(tmp_path: Path) -> None:
    assert "seen: [6, 6]" in torchrun(script(tmp_path, EARLY), seconds=240, ranks=2)


@pytest.mark.long
def test_the_example_names_the_slowed_rank() -> None:
    output = torchrun(ROOT / "examples/torchrun_ddp.py", seconds=240, ranks=3)
    assert "rank 2 is the slowest" in output
