"""The examples that need no Ray run as a user runs them, and the page names every example."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import default_collate

import paceline as pl
from gpt import GPT, Text, loss, sentences, warm_up_and_cosine
from paceline.data.sampling import Stream
from torchrun_ddp import slowest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "examples.md").read_text()
SCRIPTS = sorted(
    path
    for path in (ROOT / "examples").glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)


def run(*command: str) -> str:
    settings = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_page_has_every_script_with_its_command(script: Path) -> None:
    command = re.search(r"^Run it:  (.*)$", script.read_text(), re.M)
    assert command is not None
    assert f"```text\n{command[1]}\n```" in PAGE
    assert f"| [`{script.name}`](#" in PAGE


def test_a_session_adds_six_lines_to_a_plain_loop_and_removes_three() -> None:
    names = ("plain_loop.py", "session_loop.py")
    plain, session = ((ROOT / "examples" / name).read_text().splitlines(True) for name in names)
    diff = list(difflib.unified_diff(plain, session, *names, n=1))
    signs = [line[0] for line in diff[2:]]  # after the names of the files
    assert 0 < signs.count("+") <= 6 and 0 < signs.count("-") <= 3
    page = (ROOT / "docs" / "sessions.md").read_text()
    assert f"```diff\n{''.join(diff)}```\n" in page


def test_the_curve_of_a_gpt_is_that_of_one_process() -> None:
    """bfloat16, AdamW, warm-up and cosine, clipping: 4 workers beside a plain loop."""
    content = sentences(400)
    places = {each: token for token, each in enumerate(sorted(set(content)))}
    text = Text(torch.tensor([places[each] for each in content]))
    schedule = partial(LambdaLR, lr_lambda=partial(warm_up_and_cosine, warm_up=5, steps=40))
    adamw = partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    torch.manual_seed(0)
    model, compute = GPT(len(places), width=32), partial(loss, bf16=True)
    learner = pl.TorchLearner(
        model, compute, adamw, text, 16, scheduler=schedule, transform=pl.learners.ClipNorm(1.0)
    )
    engine = pl.Simulator(workers=4, delays=pl.delays.Exponential(1.0))
    run = pl.Trainer(learner, pl.sync(), engine, progress=False).fit(steps=40)

    optimizer = adamw(model.parameters())
    rates, stream, curve = schedule(optimizer), Stream(len(text), 0), []
    for step in range(40):
        batch = default_collate([text[i] for i in stream.indices(16 * step, 16).tolist()])
        found = compute(model, batch)
        optimizer.zero_grad()
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        curve.append(found.item())
    assert curve[-1] < 0.8 * curve[0]
    assert max(abs(run.metrics["loss"] - curve)) < 0.03  # batches of 4 are rounded otherwise


def test_a_gpt_learns_a_text_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(sentences(400))
    output = run("examples/gpt.py", "--text", str(path), "--steps", "25")
    assert output.startswith("25 steps in ")
    losses = re.search(r"test loss before ([\d.]+), after ([\d.]+)", output)
    assert losses and float(losses[2]) < 0.8 * float(losses[1])
    size = re.search(r"^(\d+) parameters$", output, re.M)
    assert size and 80_000 < int(size[1]) < 120_000


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("short")
    with pytest.raises(AssertionError, match="has 5 characters; give a text of 1000 or more"):
        run("examples/gpt.py", "--text", str(path))


def test_the_learning_rate_warms_up_and_goes_down() -> None:
    rates = [warm_up_and_cosine(step, warm_up=10, steps=100) for step in range(120)]
    assert rates[:10] == [(step + 1) / 10 for step in range(10)]
    assert rates[10] == 1 and sorted(rates[10:], reverse=True) == rates[10:]
    assert rates[-1] == rates[100] == pytest.approx(0.1)


def test_torchrun_with_two_ranks_names_one() -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    local = ["--local-addr=127.0.0.1"]
    output = run(*launch, *local, "examples/torchrun_ddp.py", "--epochs", "2", "--slow", "1")
    assert "shares (300, 300) at first" in output
    assert re.search(r"^rank \d is the slowest: \d+ of 600 samples", output, re.M)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_the_slowest_rank_has_the_smallest_share() -> None:
    assert slowest((250, 310, 40)) == ("rank 2 is the slowest: 40 of 600 samples fit its speed")
