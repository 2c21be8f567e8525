"""Draw architecture-light.svg and architecture-dark.svg: the parts of a run.

Run it:  python docs/figures/architecture.py
"""

from __future__ import annotations

from pathlib import Path

from drawing import FOLDER, WIDTH, Drawing, Theme, save

MARGIN = 16
WIDE = WIDTH - 2 * MARGIN
HEIGHT = 606
TRAINER, ENGINE = 112, 346  # their upper edges


def trainer(picture: Drawing) -> None:
    """Draw the Trainer with the parts of its coordinator."""
    theme = picture.theme
    picture.box(MARGIN, TRAINER, WIDE, 152, theme.plain, radius=6)
    picture.text(MARGIN + 14, TRAINER + 27, "Trainer", bold=True, size=17)
    picture.text(
        MARGIN + 92, TRAINER + 27, "its coordinator decides, without tensors", color=theme.muted
    )
    parts = (
        ("policy", "assigns tasks,", "decides on steps"),
        ("ledger", "keeps the state,", "checks commands"),
        ("journal", "records all; for", "report and replay"),
    )
    for place, (name, *lines) in enumerate(parts):
        x = MARGIN + 14 + place * 182
        picture.box(x, TRAINER + 44, 174, 92, theme.blue)
        picture.text(x + 87, TRAINER + 68, name, anchor="middle", bold=True)
        for line, words in enumerate(lines):
            picture.text(x + 87, TRAINER + 93 + 21 * line, words, anchor="middle", size=15)


def between(picture: Drawing) -> None:
    """Draw what goes down to the engine, and what comes back."""
    theme = picture.theme
    top = TRAINER + 152
    picture.arrow([(150, top), (150, ENGINE)])
    picture.text(164, top + 35, "commands", bold=True)
    picture.text(164, top + 56, "Start, Cancel, Step", size=15, color=theme.muted)
    picture.arrow([(370, ENGINE), (370, top)])
    picture.text(384, top + 35, "events", bold=True)
    picture.text(384, top + 56, "Joined, Finished, Left", size=15, color=theme.muted)


def engines(picture: Drawing) -> None:
    """Draw the simulator, and Ray with its workers and servers."""
    theme = picture.theme
    picture.box(MARGIN, ENGINE, WIDE, 244, theme.plain, radius=6)
    picture.text(MARGIN + 14, ENGINE + 27, "Engine", bold=True, size=17)
    picture.text(MARGIN + 88, ENGINE + 27, "one of the two; tensors stay here", color=theme.muted)
    x, y, tall = MARGIN + 14, ENGINE + 44, 186
    picture.box(x, y, 158, tall, theme.green)
    picture.text(x + 79, y + 26, "Simulator", anchor="middle", bold=True)
    lines = ("one process", "virtual time", "real gradients", "delays you choose")
    for line, words in enumerate(lines):
        picture.text(x + 79, y + 62 + 24 * line, words, anchor="middle", size=15)
    x += 168
    wide = WIDE - 28 - 168
    picture.box(x, y, wide, tall, theme.green)
    picture.text(x + 16, y + 26, "Ray", bold=True)
    picture.text(x + 56, y + 26, "real processes, many hosts", size=15)
    back = (theme.back[0], theme.green[1])
    for place, name in enumerate(("worker w0", "worker w1", "worker …")):
        picture.box(x + 14, y + 42 + 46 * place, 118, 38, back)
        picture.text(x + 73, y + 66 + 46 * place, name, anchor="middle", size=15)
    far = x + wide - 132
    picture.box(far, y + 42, 118, 130, back)
    for line, words in enumerate(("servers", "or driver:", "model and", "optimizer")):
        picture.text(far + 59, y + 72 + 25 * line, words, anchor="middle", size=15, bold=not line)
    picture.text((x + 132 + far) / 2, y + 73, "results", anchor="middle", size=15)
    picture.arrow([(x + 138, y + 84), (far - 6, y + 84)], theme.text)
    picture.text((x + 132 + far) / 2, y + 124, "model", anchor="middle", size=15)
    picture.arrow([(far - 6, y + 135), (x + 138, y + 135)], theme.text)


def draw(theme: Theme) -> str:
    """Draw the script, the Trainer and the engines below each other."""
    picture = Drawing(theme, HEIGHT, "Your script makes a Trainer, whose policy commands an engine")
    picture.box(MARGIN, 16, WIDE, 62, theme.amber, radius=6)
    picture.text(WIDTH / 2, 42, "your script", anchor="middle", bold=True, size=17)
    words = "learner: model, loss, optimizer, data"
    picture.text(WIDTH / 2, 65, words, anchor="middle")
    picture.arrow([(WIDTH / 2, 78), (WIDTH / 2, TRAINER)])
    picture.text(WIDTH / 2 + 12, 100, "fit()", code=True)
    trainer(picture)
    between(picture)
    engines(picture)
    return picture.svg()


def main(folder: Path = FOLDER) -> None:
    save("architecture", draw, folder)


if __name__ == "__main__":
    main()
