"""`paceline submit` on a real Ray that the driver starts: the driver is killed again and again."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

import paceline as pl

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the environment of all processes"),
]

SCRIPT = """
import os, signal, sys
from pathlib import Path
import numpy as np
import paceline as pl

folder, kills, steps = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])

class Kill(pl.Callback):
    def stepped(self, progress):
        mark = folder / f"killed-{progress.step}"
        if str(progress.step) in kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

learner = pl.learners.Quadratic((1.0, 0.3) * 20, noise=0.3, lr=0.1, batch_size=8)
run = pl.Trainer(
    learner, pl.sync(), pl.Ray(workers=2, cpus=0.5, timeout=60), callbacks=[Kill()], progress=False,
    checkpoints=pl.Checkpoints(folder / "saved", every=5),
).fit(steps=steps)
np.save(folder / "model.npy", run.model)
"""


def marked(mark: str) -> list[int]:
    """Return the processes that were started with a mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is of another user
            continue
    return found


@pytest.mark.parametrize(
    ("kills", "steps"),
    [
        ([3, 12, 13], 20),  # before the first checkpoint, and twice from the same one
        pytest.param(
            sorted(random.Random(5).sample(range(1, 100), 10)), 100, marks=pytest.mark.long
        ),
    ],
)
def test_a_killed_driver_is_started_again(kills: list[int], steps: int, tmp_path: Path) -> None:
    """It resumes without a word in the script, with the same bits, and no process is left."""
    script, mark = tmp_path / "script.py", f"mark-{uuid.uuid4()}"
    script.write_text(SCRIPT)
    given = [str(script), str(tmp_path), ",".join(map(str, kills)), str(steps)]
    ended = subprocess.run(
        [sys.executable, "-m", "paceline", "submit", *given],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MARK": mark},
        capture_output=True,
        text=True,
        timeout=90 * (len(kills) + 1),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert marked(mark) == []
    waits = [float(text) for text in re.findall(r"([\d.]+) s after the end", ended.stderr)]
    print(f"seconds from a kill to the next step: {waits}")
    assert len(waits) == len(kills)
    learner = pl.learners.Quadratic((1.0, 0.3) * 20, noise=0.3, lr=0.1, batch_size=8)
    whole = pl.Trainer(learner, pl.sync(), pl.Simulator(2), progress=False).fit(steps=steps)
    assert np.array_equal(np.load(tmp_path / "model.npy"), whole.model)
