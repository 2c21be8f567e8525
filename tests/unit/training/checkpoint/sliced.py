"""A simulator whose state is written in slices, as servers write it, and fails as they fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import paceline as pl
from paceline.engines.base import Job, Writing
from paceline.learners.base import Saved, Server
from paceline.learners.tensor_file import entry_of, write


class Sliced(pl.Simulator):
    """count: slices of each checkpoint.
    spoil: called with the files of a checkpoint before they are reported; may raise OSError.
    answers: whether servers report what they have written.
    """

    def __init__(
        self,
        workers: int,
        count: int,
        spoil: Callable[[Writing], None] = lambda writing: None,
        answers: bool = True,
    ) -> None:
        super().__init__(workers)
        self.count, self.spoil, self.answers = count, spoil, answers
        self.given_up: list[int] = []

    def open(self, job: Job, saved: Saved | None = None) -> None:
        self._job = job
        super().open(job, saved)

    def writer(self, folder: Path) -> Any:
        assert folder.is_dir()
        return self

    def begin(self, folder: Path, timeout: float) -> Writing:
        writing = Writing(self._results.version, folder)
        (folder / "token").write_text("of the driver")
        hashes, data = write_slices(self._job.server, folder, self.count)
        try:
            self.spoil(writing)
        except OSError as error:
            writing.failure = str(error)
            return writing
        if self.answers:
            writing.hashes, writing.data = hashes, data
        return writing

    def wait(self, writing: Writing, timeout: float) -> None:
        assert timeout >= 0

    def give_up(self, writing: Writing) -> None:
        self.given_up.append(writing.version)


def write_slices(server: Server, folder: Path, count: int) -> tuple[dict[str, str], Any]:
    """Write the state of a server in slices; return the hashes, and what is in no array."""
    layout, saved = server.layout, server.save()
    hashes, parts = {}, []
    for index, span in enumerate(layout.spans(count)):
        part = layout.cut([((0, layout.size), saved)], span)
        name = f"state-{index:05d}-of-{count:05d}.safetensors"
        entries = [entry_of(f"server/{key}", array) for key, array in part.arrays.items()]
        hashes[name] = write(folder / name, entries)
        parts.append((span, part))
    return hashes, layout.cut(parts, (0, layout.size)).data
