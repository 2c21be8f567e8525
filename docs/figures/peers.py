"""Draw peers-light.svg and peers-dark.svg: seconds to a loss beside what people use.

The figures are those of benchmarks/results/peers.json, the saved run of benchmarks/peers.py.

Run it:  python docs/figures/peers.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drawing import FOLDER, WIDTH, Drawing, Theme, save

RESULTS = FOLDER.parents[1] / "benchmarks" / "results" / "peers.json"
SCENARIOS = {
    "calm": "equal hosts, no faults",
    "speeds": "speeds 1 : 1 : 2 : 4",
    "stalls": "a random host stops for 2 s, every 10 s",
    "slow link": "one link at a tenth of its rate",
    "killed": "a host is killed, and back after 20 s",
    "far": "20 Mbit/s and 50 ms between all hosts",
    "added": "three hosts, a fourth after 5 s",
}
ARMS = {
    "ddp": "DDP",
    "torchft": "torchft",
    "ray train": "Ray Train",
    "hivemind": "Hivemind",
    "torchft diloco": "torchft DiLoCo",
    "diloco": "DiLoCo, by hand",
    "local_sgd + shares": "Paceline",
}
OURS = "local_sgd + shares"
LIMIT = 180  # seconds of a run
LEFT, RIGHT = 150, WIDTH - 70
BAR, LANE, TITLE, GAP, TOP = 14, 20, 26, 10, 12


def shown(medians: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the arms that ran in a scenario, in the order of ARMS."""
    return {arm: medians[arm] for arm in ARMS if medians.get(arm, {}).get("runs")}


def at(seconds: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * seconds / LIMIT, 1)


def panel(picture: Drawing, top: float, title: str, arms: dict[str, dict[str, Any]]) -> None:
    """Draw a scenario: a bar for each arm, with the range over seeds."""
    theme = picture.theme
    picture.text(16, top + 17, title, bold=True)
    for place, (arm, about) in enumerate(arms.items()):
        y = top + TITLE + LANE * place
        picture.text(LEFT - 8, y + 12, ARMS[arm], anchor="end", size=15, bold=arm == OURS)
        if "seconds" not in about:
            picture.text(LEFT + 4, y + 12, f"not within {LIMIT} s", size=15, color=theme.muted)
            continue
        colors = theme.green if arm == OURS else theme.plain
        picture.box(LEFT, y, at(about["seconds"]) - LEFT, BAR, colors, radius=2)
        least, most = at(about["least"]), at(about["most"])
        if most > least:
            picture.path(f"M{least:g} {y + BAR / 2:g}H{most:g}", theme.text, 1.5)
        end = max(most, at(about["seconds"])) + 6
        picture.text(end, y + 12, f"{about['seconds']:.0f} s", size=15, bold=arm == OURS)


def draw(theme: Theme) -> str:
    """Draw all scenarios that were measured."""
    scenarios = json.loads(RESULTS.read_text())["figures"]["scenarios"]
    panels = {name: shown(scenarios[name]) for name in SCENARIOS if name in scenarios}
    sizes = [TITLE + LANE * len(arms) + GAP for arms in panels.values()]
    picture = Drawing(
        theme, TOP + sum(sizes), "Seconds to a loss on four hosts, by scenario and method"
    )
    top = TOP
    for (name, arms), size in zip(panels.items(), sizes, strict=True):
        panel(picture, top, SCENARIOS[name], arms)
        top += size
    return picture.svg()


def main(folder: Path = FOLDER) -> None:
    save("peers", draw, folder)


if __name__ == "__main__":
    main()
