"""Draw report-light.png, report-dark.png and report-phone.png: the run of docs/report.md.

Run it:  python docs/figures/report.py
Needs:   chromium, pip install pillow
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

import paceline as pl

SPEEDS = [0.10, 0.11, 0.13, 0.14, 0.16, 0.18, 0.19, 0.60]  # seconds a task; the last one is slow
PRICES = pl.Prices(per_hour=1.2, per_gigabyte=0.1)
FOLDER = Path(__file__).parent
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
DARK = "--blink-settings=preferredColorScheme=0"


def ran() -> pl.Run:
    """Make the run of docs/report.md."""
    delays = [pl.delays.ShiftedExponential(seconds, 0.03) for seconds in SPEEDS]
    engine = pl.Simulator(
        8, delays, schedule=[(4.0, pl.protocol.Left("w2")), (9.0, pl.protocol.Joined("w2"))]
    )
    learner = pl.learners.Quadratic((1.0, 0.3) * 20, noise=2.0, lr=0.1, batch_size=256)
    return pl.Trainer(learner, pl.k_sync(6), engine, prices=PRICES, progress=False).fit(steps=120)


def draw(page: Path, target: Path, width: int, height: int, *flags: str) -> None:
    """Let a browser draw the beginning of a page."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))))
    size = f"--window-size={width},{height}"
    with tempfile.TemporaryDirectory() as own:
        paths = f"--user-data-dir={own}", f"--screenshot={target}"
        command = [chromium, *FLAGS, *paths, size, *flags, page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    Image.open(target).convert("RGB").quantize(64).save(target, optimize=True)  # half the size


if __name__ == "__main__":
    run = ran()
    with tempfile.TemporaryDirectory() as folder:
        page = run.report(Path(folder) / "run.html")
        draw(page, FOLDER / "report-light.png", 1080, 2420)
        draw(page, FOLDER / "report-dark.png", 1080, 1740, DARK)
        draw(page, FOLDER / "report-phone.png", 390, 1630)
