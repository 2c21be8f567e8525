"""Draw choose-light.svg and choose-dark.svg: which policy when, as questions and answers.

Run it:  python docs/figures/choose.py
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from drawing import FOLDER, WIDTH, Drawing, Theme, save


class Question(NamedTuple):
    """A question of two lines, and the policy that one of its answers leads to."""

    lines: tuple[str, str]
    answer: str  # that leads to the policy; the other one leads to the next question
    policy: str
    reason: str


QUESTIONS = (
    Question(
        ("Does sending take longer", "than computing?"), "yes", "local_sgd(steps)", "or compression"
    ),
    Question(
        ("Under sync(), do workers wait", "10 % of their time or more?"),
        "no",
        "sync()",
        "little to gain",
    ),
    Question(
        ("Are the same machines", "always slow?"),
        "yes",
        "sync() + BySpeed()",
        "a share that fits each speed",
    ),
    Question(
        ("Are only a few machines", "slow at a time?"),
        "yes",
        "k_sync(k)",
        "leaves the stragglers out",
    ),
    Question(
        ("Are batches and steps", "of the optimizer small?"),
        "yes",
        "ringmaster(r)",
        "results may be stale",
    ),
)
LAST = ("rennala(b)", "no result is stale")
LEFT, RIGHT, MARGIN = 260, 230, 16
BOX, ROW, TOP = 58, 92, 16
HEIGHT = TOP + ROW * len(QUESTIONS) + BOX + 16
OTHER = {"yes": "no", "no": "yes"}


def policy(picture: Drawing, x: float, y: float, name: str, reason: str) -> None:
    picture.box(x, y, RIGHT, BOX, picture.theme.green)
    middle = x + RIGHT / 2
    picture.text(middle, y + 25, name, anchor="middle", bold=True, code=True)
    picture.text(middle, y + 46, reason, anchor="middle", size=15)


def draw(theme: Theme) -> str:
    """Draw the questions below each other, and their answers on the right."""
    picture = Drawing(theme, HEIGHT, "Which policy when: five questions that lead to a policy")
    far = WIDTH - MARGIN - RIGHT
    middle = MARGIN + LEFT / 2
    for place, (lines, answer, name, reason) in enumerate(QUESTIONS):
        y = TOP + ROW * place
        picture.box(MARGIN, y, LEFT, BOX, theme.plain)
        for line, text in enumerate(lines):
            picture.text(middle, y + 25 + 21 * line, text, anchor="middle")
        picture.arrow([(MARGIN + LEFT, y + BOX / 2), (far, y + BOX / 2)])
        between = (MARGIN + LEFT + far) / 2 - 4
        picture.text(between, y + BOX / 2 - 8, answer, anchor="middle", bold=True)
        policy(picture, far, y, name, reason)
        picture.arrow([(middle, y + BOX), (middle, y + ROW)])
        picture.text(middle + 12, y + BOX + 22, OTHER[answer], bold=True)
    policy(picture, middle - RIGHT / 2, TOP + ROW * len(QUESTIONS), *LAST)
    return picture.svg()


def main(folder: Path = FOLDER) -> None:
    save("choose", draw, folder)


if __name__ == "__main__":
    main()
