"""The page of a run: whole, offline, safe, and with the figures of its meter."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import paceline as pl
from paceline.cli.app import app
from paceline.core.journal import Header, Journal
from paceline.core.protocol import Finished, Interrupted
from paceline.report.html.collect import Record
from paceline.report.html.page import brief, page, record_of
from paceline.report.html.tables import forecast_rows
from paceline.report.words import in_time
from tests.policies import POLICIES

DELAYS = [pl.delays.ShiftedExponential(0.1, 0.02)] * 3 + [pl.delays.Fixed(1.0)]
SECTIONS = ["what", "loss", "timeline", "slow", "steps", "parts", "forecast", "again"]
VOID = {"meta", "input", "br"}


class Reader(HTMLParser):
    """Reads a page, and fails where tags are not closed as they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def check(text: str) -> Reader:
    """Look at all that must hold of any page."""
    found = Reader(text)
    assert len(text.encode()) < 1_000_000
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", text)
    names = {tag for tag, _ in found.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "use", "image"}
    for _, attributes in found.tags:
        assert not {"src", "href", "srcset", "style", "onload"} & set(attributes)
    assert "default-src 'none'" in text
    assert len(found.ids) == len(set(found.ids))
    assert [id for id in found.ids if id in SECTIONS] == SECTIONS
    for tag, attributes in found.tags:
        if tag == "th":
            assert attributes.get("scope") in ("col", "row", "colgroup")
        if tag == "svg":
            assert attributes.get("role") == "img" or attributes.get("aria-hidden") == "true"
        for name in ("d", "x", "y", "viewbox"):
            assert "nan" not in (attributes.get(name) or "") and "inf" not in (
                attributes.get(name) or ""
            )
    drawn = sum(attributes.get("role") == "img" for tag, attributes in found.tags if tag == "svg")
    assert sum(tag == "desc" for tag, _ in found.tags) == drawn
    return found


def learner() -> pl.learners.Quadratic:
    return pl.learners.Quadratic(curvature=(1.0, 0.1), noise=1.0, batch_size=16)


def ran(policy: pl.protocol.Policy, steps: int = 60, **given: object) -> pl.Run:
    engine = pl.Simulator(
        4, DELAYS, schedule=[(3.0, pl.protocol.Left("w1")), (6.0, pl.protocol.Joined("w1"))]
    )
    trainer = pl.Trainer(learner(), policy, engine, progress=False, **given)  # type: ignore[arg-type]
    return trainer.fit(steps=steps)


@pytest.fixture
def paceline() -> Callable[..., Result]:
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_page_has_the_figures_of_the_meter(policy: str, tmp_path: Path) -> None:
    prices = pl.Prices(per_hour=1.0, per_gigabyte=5.0)
    run = ran(POLICIES[policy](), prices=prices, journal=tmp_path / "run.jsonl")
    path = run.report(tmp_path / "deep" / "run.html")
    found = check(path.read_text(encoding="utf-8"))
    words, meter = found.words, run.meter
    for line in run.summary().splitlines():
        if not line.startswith("  journal"):  # the page names it where it says how to replay it
            assert " ".join(line.split()) in words
    assert f"Of {meter.started} tasks {meter.used} were used and {meter.wasted} wasted" in words
    assert f"waited for {meter.waiting:.0%} of their time" in words
    for name, tally in meter.workers.items():
        assert f"{name} " in words and f" {tally.used} " in words
    assert f"paceline replay {tmp_path / 'run.jsonl'}" in words
    assert "by dollars" in words and "by bytes" in words
    asynchronous = float(run.metrics["staleness"].mean()) > 0.1
    refilling = record_of(run.journals).is_refilling
    assert ("The cost of waiting is not shown" in words) == (asynchronous or refilling)
    assert ("Waited for it In steps" in words) == (not asynchronous and not refilling)


def test_the_command_writes_the_same_page_as_the_run(
    tmp_path: Path, paceline: Callable[..., Result]
) -> None:
    run = ran(pl.k_sync(3), journal=tmp_path / "run.jsonl")
    mine = run.report(tmp_path / "a.html").read_text(encoding="utf-8")
    found = paceline("report", tmp_path / "run.jsonl", "-o", tmp_path / "b.html")
    assert found.exit_code == 0, found.stderr
    assert found.stdout == paceline("report", tmp_path / "run.jsonl").stdout
    assert f"wrote {tmp_path / 'b.html'}" in found.stderr
    assert (tmp_path / "b.html").read_text(encoding="utf-8") == mine


def test_a_journal_is_not_written_over(tmp_path: Path, paceline: Callable[..., Result]) -> None:
    path = tmp_path / "run.jsonl"
    run = ran(pl.k_sync(3), journal=path)
    before = path.read_bytes()
    found = paceline("report", path, "-o", path)
    assert found.exit_code == 1 and "is a journal and would be overwritten" in found.stderr
    with pytest.raises(ValueError, match=r"such as run\.html"):
        run.report(path)
    assert path.read_bytes() == before


def test_the_command_that_replays_is_one_for_a_shell(tmp_path: Path) -> None:
    path = tmp_path / "a;b c.jsonl"
    run = ran(pl.sync(), steps=2, journal=path)
    words = check(run.report(tmp_path / "a.html").read_text(encoding="utf-8")).words
    assert f"paceline replay '{path}'" in words


def test_without_prices_and_messages_there_is_nothing_of_them(tmp_path: Path) -> None:
    run = ran(pl.k_sync(3))
    words = check(run.report(tmp_path / "a.html").read_text(encoding="utf-8")).words
    assert "$" not in words and "by dollars" not in words
    assert "The journal was kept in memory" in words and "Nothing was forecast" in words


def test_names_are_texts_and_never_tags() -> None:
    evil = "<script>alert('x')</script>"
    about = {"policy": evil, "engine": f"{evil}(…)", "seed": evil, evil: evil, "codec": evil}
    about["versions"] = {evil: evil}  # type: ignore[assignment]
    journal = Journal(Header(policy=evil, about=about))
    coordinator = pl.protocol.Coordinator(pl.sync(), journal=journal)
    coordinator.handle(0.0, pl.protocol.Joined(evil))
    coordinator.handle(1.0, Finished(0, 1, stats={"loss": 1.0}))
    coordinator.handle(2.0, Interrupted(evil))
    text = page(record_of({"main": journal}), [evil], [evil])
    words = check(text).words
    assert "<script" not in text.lower()
    assert f"paceline replay {shlex.quote(evil)}" in words and f"it ended with “{evil}”" in words


def test_losses_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    journal = Journal(Header(policy="x", batch=1))
    coordinator = pl.protocol.Coordinator(pl.sync(), journal=journal)
    coordinator.handle(0.0, pl.protocol.Joined("w0"))
    for task, loss in enumerate([3.0, float("nan"), float("inf"), 2.0]):
        coordinator.handle(task + 1.0, Finished(task, 1, stats={"loss": loss}))
    words = check(page(record_of({"main": journal}))).words
    assert "The loss of 2 steps is not a finite number" in words
    assert "the loss fell from 3 to 2" in words


def lost(*losses: float) -> Record:
    """Return a run of one worker whose results told these losses."""
    journal = Journal(Header(policy="x", batch=1))
    coordinator = pl.protocol.Coordinator(pl.sync(), journal=journal)
    coordinator.handle(0.0, pl.protocol.Joined("w0"))
    for task, loss in enumerate(losses):
        coordinator.handle(task + 1.0, Finished(task, 1, stats={"loss": loss}))
    return record_of({"main": journal})


@pytest.mark.parametrize("last", ["nan", "inf"])
def test_a_run_that_diverged_is_called_so(last: str) -> None:
    words = check(page(lost(3.0, 9.0, float(last)))).words
    told = f"the loss went from 3 to {last}: the last one is not a finite number"
    assert told in words and f" loss {last} from 3 " in words and f"loss 3 -> {last}" in words
    words = check(page(lost(3.0))).words
    assert "with a loss of 3;" in words and " loss 3 from 3 " in words


def test_a_loss_that_was_never_a_number_was_told() -> None:
    words = check(page(lost(*[float("nan")] * 3))).words
    assert "with a loss that was never a finite number" in words and " loss nan " in words
    assert (
        "The loss was never a finite number" in words and "No result reported its loss" not in words
    )


def test_a_run_without_losses() -> None:
    engine = pl.Simulator(2, pl.delays.Fixed(1.0))
    run = pl.Trainer(pl.learners.TimingOnly(batch_size=4), pl.sync(), engine, progress=False).fit(
        steps=3
    )
    assert "No result reported its loss." in check(page(record_of(run.journals))).words


def test_a_journal_without_entries_and_one_without_steps() -> None:
    words = check(page(record_of({"main": Journal()}))).words
    assert "No step was taken by 0 workers" in words and "No worker joined." in words
    coordinator = pl.protocol.Coordinator(pl.sync(), journal=Journal())
    coordinator.handle(0.0, pl.protocol.Joined("w0"))
    coordinator.handle(2.0, pl.protocol.Left("w0"))
    words = check(page(record_of({"main": coordinator.journal}))).words
    assert "No step was taken by 1 worker in 2 s" in words
    assert "The journal has no end" in words


def test_a_run_of_one_step() -> None:
    words = check(page(record_of(ran(pl.sync(), steps=1).journals))).words
    assert "4 workers took 1 step in" in words


def test_a_torn_journal_is_shown_as_far_as_it_goes(
    tmp_path: Path, paceline: Callable[..., Result]
) -> None:
    path = tmp_path / "run.jsonl"
    ran(pl.k_sync(3), journal=path)
    text = path.read_text()
    path.write_text(text[: 2 * len(text) // 3])
    assert paceline("report", path, "-o", tmp_path / "a.html").exit_code == 0
    words = check((tmp_path / "a.html").read_text(encoding="utf-8")).words
    assert "the journal does not say that the run has ended" in words


def test_a_resumed_run_tells_what_came_after(tmp_path: Path) -> None:
    def trainer() -> pl.Trainer:
        engine = pl.Simulator(4, DELAYS)
        saves = pl.Checkpoints(tmp_path / "saved", every=5)
        return pl.Trainer(learner(), pl.k_sync(3), engine, progress=False, checkpoints=saves)

    trainer().fit(steps=10)
    run = trainer().resume(tmp_path / "saved").fit(steps=25)
    words = check(page(record_of(run.journals, run.reason))).words
    assert "at step 10: the metrics cover the time after that" in words
    assert "4 workers took 15 steps" in words


def gossip(folder: Path, name: str = "g", seed: int = 0) -> pl.Run:
    rows = np.random.default_rng(0).standard_normal((400, 3))
    least = pl.learners.LeastSquares(rows, rows.sum(axis=1), 0.05, batch_size=16)
    engine = pl.Simulator(
        4, DELAYS, schedule=[(3.0, pl.protocol.Left("w1")), (6.0, pl.protocol.Joined("w1"))]
    )
    path = folder / f"{name}.jsonl"
    policy = pl.gossip.Gossip(pl.gossip.ring(4))
    return pl.Trainer(least, policy, engine, seed=seed, progress=False, journal=path).fit(steps=30)


def test_a_run_without_a_main_node(tmp_path: Path, paceline: Callable[..., Result]) -> None:
    run = gossip(tmp_path)
    mine = check(run.report(tmp_path / "a.html").read_text(encoding="utf-8")).words
    paths = [tmp_path / f"g-w{i}.jsonl" for i in range(4)]
    found = paceline("report", *paths, "-o", tmp_path / "b.html")
    assert found.exit_code == 0, found.stderr
    words = check((tmp_path / "b.html").read_text(encoding="utf-8")).words
    assert f"4 nodes took {run.meter.version} steps" in words
    assert f"{run.meter.started} started, {run.meter.used} used, " in words
    assert f"{run.meter.started} started, {run.meter.used} used, " in mine
    assert "No node waits for another" in words and "Whose data were learned from" in words
    data = json.loads(paceline("report", "--json", *paths).stdout)
    assert data["journals"] == [str(path) for path in paths]
    assert data["steps"] == run.meter.version and data["bytes_up"] == run.meter.up_bytes
    few = paceline("report", *paths[:2], "-o", tmp_path / "c.html")
    assert few.exit_code == 0
    words = check((tmp_path / "c.html").read_text(encoding="utf-8")).words
    assert "The journals of w2, w3 were not given" in words
    one = paceline("report", paths[0], "-o", tmp_path / "d.html")
    assert one.exit_code == 0
    assert "1 node took" in check((tmp_path / "d.html").read_text(encoding="utf-8")).words


def test_journals_that_do_not_belong_together(
    tmp_path: Path, paceline: Callable[..., Result]
) -> None:
    gossip(tmp_path)
    gossip(tmp_path, "h", seed=1)
    ran(pl.sync(), journal=tmp_path / "main.jsonl")
    a, b = tmp_path / "g-w0.jsonl", tmp_path / "h-w1.jsonl"
    for paths, told in [
        ((a, b), "are not of one run: seed is 0 and 1"),
        ((a, tmp_path / "main.jsonl"), "is of a run with a central coordinator"),
        ((a, tmp_path / "h-w0.jsonl"), "are both of node w0"),
        ((a, a), "given twice"),
    ]:
        found = paceline("report", *paths, "-o", tmp_path / "a.html")
        assert found.exit_code == 1 and told in found.stderr
        assert not (tmp_path / "a.html").exists()


def test_data_that_are_hardly_learned_from_are_warned_of(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((400, 3))
    least = pl.learners.LeastSquares(rows, rows.sum(axis=1), 0.05, batch_size=16)
    placed = pl.policies.Placed(pl.partition.even(400, 4, seed=0), move=False, bound=None)
    engine = pl.Simulator(4, DELAYS)
    run = pl.Trainer(least, pl.k_sync(3), engine, placement=placed, progress=False).fit(steps=40)
    words = check(page(record_of(run.journals))).words
    assert "Whose data were learned from" in words
    represented = run.meter.represented()
    assert f"{represented.min():.0%}" in words
    few = int((represented < 0.5).sum())
    assert (f"{few} data shard" in words and "Warning." in words) == (few > 0)


def test_a_forecast_beside_the_fact(tmp_path: Path) -> None:
    quadratic = pl.learners.Quadratic((1.0, 0.3) * 4, noise=0.3, lr=0.2, batch_size=12)
    engine = pl.Simulator(
        3, [pl.delays.Fixed(0.1), pl.delays.Fixed(0.1), pl.delays.Fixed(1.0)], unit=1
    )
    found = pl.profile(quadratic, engine, seconds=60, prices=pl.Prices(per_hour=1.0))
    plan = pl.plan(found, target=0.5, learning_rate=0.2)
    trainer = pl.Trainer(quadratic, plan, engine, progress=False, prices=pl.Prices(per_hour=1.0))
    run = trainer.fit(steps=60)
    words = check(run.report(tmp_path / "a.html").read_text(encoding="utf-8")).words
    at = int(np.flatnonzero(run.metrics["loss"] <= 0.5)[0])
    low, high = plan.forecast.intervals["seconds"]
    seconds = run.metrics["seconds"][at]
    inside = "inside" if low <= seconds <= high else "outside"
    assert f"{inside} the interval" in words and "target 0.5" in words
    assert f" {seconds:.3g} s " in words and f" {run.metrics['step'][at]:.0f} " in words


def test_a_forecast_beside_the_fact_of_a_resumed_run(tmp_path: Path) -> None:
    engine = pl.Simulator(
        3, [pl.delays.Fixed(0.1), pl.delays.Fixed(0.1), pl.delays.Fixed(1.0)], unit=1
    )
    prices = pl.Prices(per_hour=1.0, per_gigabyte=1.0)

    def quadratic() -> pl.learners.Quadratic:
        return pl.learners.Quadratic((1.0, 0.3) * 4, noise=0.3, lr=0.02, batch_size=12)

    profile = pl.profile(quadratic(), engine, seconds=60, prices=prices)
    plan = pl.plan(profile, target=0.5, learning_rate=0.02)
    saves = pl.Checkpoints(tmp_path / "saved")

    def trainer() -> pl.Trainer:
        return pl.Trainer(
            quadratic(), plan, engine, prices=prices, progress=False, checkpoints=saves
        )

    trainer().fit(steps=5)
    run = trainer().resume(tmp_path / "saved").fit(steps=300)
    found = np.flatnonzero(run.metrics["loss"] <= 0.5)
    assert len(found) and found[0] > 0, "the target is to be reached after it was resumed"
    at = int(found[0])
    seconds, step = run.metrics["seconds"][at], run.metrics["step"][at]
    assert step == at + 6
    record = record_of(run.journals, run.reason)
    assert f"and it took {in_time(seconds)}, " in check(page(record)).words
    forecast = (record.header.about or {})["forecast"]
    rows = {row["name"]: row for row in forecast_rows(forecast, record)}
    assert rows["time"]["fact"] == in_time(seconds) and rows["time"]["inside"] != "–"
    assert rows["steps"]["fact"] == f"{step:.0f}"
    for name in ("cost", "messages"):
        assert rows[name]["fact"] == "not known: the run was resumed"
        assert rows[name]["ratio"] == rows[name]["inside"] == "–"
    easy = {**forecast, "target": 1e9}
    facts = {row["fact"] for row in forecast_rows(easy, record)}
    assert facts == {"before this run was resumed"}


def test_what_was_replanned_is_told() -> None:
    run = ran(pl.k_sync(3))
    words = check(page(record_of(run.journals), changes=["at step 9: w3 is slower"])).words
    assert "Replanned at step 9: w3 is slower" in words
    (journal,) = run.journals.values()
    about = {**(journal.header.about or {}), "written": "Auto(target=1, goal='time')"}
    planned = {"main": Journal(Header(policy="x", about=about))}
    for changes, told in ((None, "The journal does not say"), ([], "The run was not replanned.")):
        assert told in check(page(record_of(planned), changes=changes)).words


def test_a_long_run_of_many_workers_is_a_small_page() -> None:
    delays = [pl.delays.ShiftedExponential(0.08 * (1 + i % 5), 0.02) for i in range(80)]
    engine = pl.Simulator(
        80, delays, schedule=[(5.0, pl.protocol.Left("w3")), (9.0, pl.protocol.Joined("w3"))]
    )
    many = pl.learners.Quadratic(curvature=(1.0, 0.1), noise=1.0, batch_size=160)
    run = pl.Trainer(many, pl.k_sync(60), engine, progress=False).fit(steps=150)
    record = record_of(run.journals)
    assert record.timeline.exact is None
    text = page(record)
    assert len(text.encode()) - len(pl.__version__) < 500_000
    words = check(text).words
    assert "The slowest 32 and the quickest 32 are shown; 16 between them are not." in words


@pytest.mark.parametrize("text", ["", "Auto(target=1, goal='time')", "f(" * 200, ")))(("])
def test_any_text_can_be_a_title(text: str) -> None:
    assert len(brief(text)) <= 120
