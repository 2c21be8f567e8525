"""Draw the first screens of the documentation, of a report, and README's figure, to look at them.

Each as a laptop shows it in light and dark, and as a phone does. Nothing of it is committed.

Run it:  make docs && python docs/figures/screenshots.py FOLDER
Needs:   chromium, pip install pillow
"""

import sys
import tempfile
from pathlib import Path

from report import DARK, FOLDER, draw, ran

BUILT = FOLDER.parent / "_build"
LAPTOP, PHONE = (1440, 900), (390, 844)


def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pages = {
            "docs": BUILT / "index.html",
            "report": ran().report(Path(folder) / "run.html"),
            "figure": FOLDER / "stragglers.svg",
        }
        for name, page in pages.items():
            draw(page, target / f"{name}-light.png", *LAPTOP)
            draw(page, target / f"{name}-dark.png", *LAPTOP, DARK)
            draw(page, target / f"{name}-phone.png", *PHONE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
