"""The page in a real browser: it is drawn, light and dark, and fits a phone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from matplotlib.image import imread

import paceline as pl

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    delays = [pl.delays.ShiftedExponential(0.1, 0.02)] * 3 + [pl.delays.Fixed(1.0)]
    engine = pl.Simulator(
        4, delays, schedule=[(3.0, pl.protocol.Left("w1")), (6.0, pl.protocol.Joined("w1"))]
    )
    learner = pl.learners.Quadratic((1.0, 0.1), noise=1.0, batch_size=16)
    prices = pl.Prices(per_hour=1.0)
    trainer = pl.Trainer(learner, pl.k_sync(3), engine, prices=prices, progress=False)
    return trainer.fit(steps=60).report(tmp_path_factory.mktemp("page") / "run.html")


def chromium(folder: Path, *arguments: str) -> str:
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    own = f"--user-data-dir={folder / 'chromium'}"
    done = subprocess.run(
        [CHROMIUM, *flags, own, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_drawn_in_both_schemes(html: Path, tmp_path: Path, scheme: str) -> None:
    target = tmp_path / "a.png"
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    size = "--window-size=700,900"
    chromium(tmp_path, f"--screenshot={target}", size, *dark, html.as_uri())
    pixels = imread(target)[:, :, :3]
    back = pixels[0, 0]
    assert (back.max() < 0.25) == (scheme == "dark") and (back.min() > 0.9) == (scheme == "light")
    marked = (abs(pixels - back) > 0.1).any(axis=2).mean()
    assert 0.02 < marked < 0.6


def test_it_fits_a_phone(html: Path, tmp_path: Path) -> None:
    """A frame as wide as a phone says how wide the page in it is."""
    text = html.read_text(encoding="utf-8").replace(
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; """
        """style-src 'unsafe-inline'; img-src data:">""",
        "",
    )
    assert "Content-Security-Policy" not in text
    tell = "<script>document.title = 'wide ' + document.documentElement.scrollWidth</script>"
    copy = tmp_path / "copy.html"
    copy.write_text(text.replace("</body>", f"{tell}</body>"), encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe id="f" width="390" height="800" src="{copy.name}"></iframe><script>'
        'document.getElementById("f").onload = e => document.title = '
        "e.target.contentDocument.title</script>"
    )
    found = chromium(
        tmp_path, "--dump-dom", "--allow-file-access-from-files", "--virtual-time-budget=3000",
        frame.as_uri(),
    )  # fmt: skip
    assert "<title>wide 390</title>" in found, found[:300]
