"""The journal of a run: events and commands, entry by entry, in memory or as lines of JSON.

The journal is the single source for reports, for fitting delay models and for replaying a run.
A file's first line is its header; each further line is one entry.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from paceline.core.logs import logger_of
from paceline.core.protocol import Command, Event, Peer, Prices
from paceline.core.state import decode, encode

logger = logger_of(__name__)

FORMAT = 2
# The errors from reading a line that is valid JSON but not an entry.
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError)
_AT_ONCE = 64  # lines parsed together: faster than single lines, and than larger chunks


class Entry(NamedTuple):
    """An event, its time, and the commands that answered it."""

    now: float
    event: Event
    commands: tuple[Command, ...]


@dataclass(frozen=True)
class Header:
    """The settings of the run, and the state that it starts from if it was resumed."""

    policy: str = ""
    batch: int = 1
    about: Mapping[str, Any] | None = None  # engine, versions, seed: for readers and reports
    state: Mapping[str, Any] | None = None
    message_bytes: int = 0  # of a model, and of a result
    prices: Prices = Prices()
    tiles: tuple[int, ...] = ()  # the samples of each tile (data shard), if the data are placed
    peer: Peer | None = None  # the node of a decentralized run

    @property
    def written(self) -> str:
        """The policy as its user wrote it, if the journal says so."""
        about = self.about or {}
        return str(about.get("written") or about.get("policy", self.policy))

    @property
    def version(self) -> int:
        """The model version that the journal starts from."""
        return 0 if self.state is None else int(self.state["ledger"]["state"]["version"])


class Journal:
    """Entries in order: in memory, or in a file to which each entry is appended.

    With a path the entries are only on disk, and iteration reads them back. A long run then needs
    no more memory than a short one. `keep=False` drops the entries (large simulations).
    """

    def __init__(
        self, header: Header | None = None, path: Path | str | None = None, keep: bool = True
    ) -> None:
        self.header = header or Header()
        self.path = None if path is None else Path(path)
        self._keep = keep and path is None
        self._entries: list[Entry] = []
        self._count = 0
        self._file: TextIO | None = None
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "w", 1, encoding="utf-8")  # noqa: SIM115 (see close)
            self._file.write(dump_header(self.header) + "\n")

    def append(self, entry: Entry) -> None:
        if self._keep:
            self._entries.append(entry)
        elif self.path is not None and not self._write(dump_entry(entry) + "\n"):
            return
        self._count += 1

    def _write(self, line: str) -> bool:
        """Write a line; on an OSError, such as a full disk, warn and end the journal."""
        if self._file is None:
            return False
        try:
            self._file.write(line)
            return True
        except OSError as error:
            logger.warning(
                "the journal %s cannot be written, and the run continues without it: %s; free "
                "disk space, or give a path on another disk", self.path, error,
            )  # fmt: skip
            self.close()
            return False

    def close(self) -> None:
        """Close the file, if there is one; the journal can still be read."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk, which was logged
                file.close()

    def save(self, path: Path | str) -> None:
        """Write the whole journal to a file."""
        if self.path is not None and self.path.resolve() == Path(path).resolve():
            if self._file is not None:
                self._file.flush()
            return  # the file is complete; opening it for writing would empty it
        copy = Journal(self.header, path)
        for entry in self:
            copy.append(entry)
        copy.close()

    @classmethod
    def load(
        cls,
        path: Path | str,
        on_progress: Callable[[float], None] | None = None,
        most: int | None = None,
    ) -> Journal:
        """Read a file into memory; skip an incomplete last line, which a crash may leave.

        on_progress: called from time to time with the bytes read so far.
        most: the number of entries to read; None: all.
        """
        journal = cls(read_header(path))
        for entry in islice(read_entries(path, on_progress), most):
            journal.append(entry)
        return journal

    def __iter__(self) -> Iterator[Entry]:
        if self.path is None:
            return iter(self._entries)
        if self._file is not None:
            self._file.flush()
        return read_entries(self.path)

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Journal) and len(self) == len(other) and all(map(same, self, other))
        )

    __hash__ = None  # type: ignore[assignment]


def same(mine: Entry, theirs: Entry) -> bool:
    """Return whether two entries have the same event, time and commands."""
    return mine == theirs or dump_entry(mine) == dump_entry(theirs)  # nan is not equal to nan


def read_header(path: Path | str) -> Header:
    """Read the first line of a journal's file."""
    with open(path, encoding="utf-8") as file:
        head = _line(path, 1, file.readline())
    if not isinstance(head, dict) or head.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not a journal of format {FORMAT}")
    try:
        prices = Prices(**head.pop("prices", {}))
        head["tiles"] = tuple(head.get("tiles", ()))
        if (peer := head.get("peer")) is not None:
            head["peer"] = Peer(peer["name"], tuple(peer["neighbors"]), tuple(peer["tensors"]))
        return Header(**head, prices=prices)
    except _DAMAGE as error:
        raise _damaged(path, 1, error) from error


def read_entries(
    path: Path | str, on_progress: Callable[[float], None] | None = None
) -> Iterator[Entry]:
    """Yield the entries of a journal's file, without keeping them in memory.

    An incomplete last line, which a crash may leave, is skipped.

    on_progress: called from time to time with the bytes read so far.
    """
    with open(path, encoding="utf-8") as file:
        read, count = len(file.readline()), 2  # after the header
        while lines := list(islice(file, _AT_ONCE)):
            read += sum(map(len, lines))
            if on_progress is not None:
                on_progress(read)
            if not lines[-1].endswith("\n"):
                del lines[-1]
            try:
                parsed = json.loads(f"[{','.join(lines)}]")
            except json.JSONDecodeError:
                parsed = [_line(path, count + place, text) for place, text in enumerate(lines)]
            entries: Iterable[Entry]
            try:
                entries = list(map(_entry, parsed))
            except _DAMAGE:
                entries = _entries(path, count, parsed)
            count += len(lines)
            yield from entries


def _entries(path: Path | str, first: int, parsed: list[Any]) -> Iterator[Entry]:
    """Yield entries one by one; raise an error with the line number of a damaged one."""
    for number, data in enumerate(parsed, first):
        try:
            yield _entry(data)
        except _DAMAGE as error:
            raise _damaged(path, number, error) from error


def _damaged(path: Path | str, number: int, error: Exception) -> ValueError:
    why = f"{type(error).__name__}: {error}"
    return ValueError(f"{path}, line {number}: damaged, or of another version ({why})")


def _line(path: Path | str, number: int, text: str) -> Any:
    """Parse one line; on failure raise an error with its line number."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: {error}") from error


def dump_header(header: Header) -> str:
    """Return a header as one line of JSON."""
    data = {"format": FORMAT, **asdict(header)}
    if header.peer is None:
        del data["peer"]
    return json.dumps(data)


def dump_entry(entry: Entry) -> str:
    """Return an entry as one line of JSON."""
    data: dict[str, Any] = {"now": entry.now, "event": encode(entry.event)}
    if entry.commands:
        data["commands"] = [encode(command) for command in entry.commands]
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def parse_entry(line: str) -> Entry:
    """Invert `dump_entry`."""
    return _entry(json.loads(line))


def _entry(data: dict[str, Any]) -> Entry:
    commands = data.get("commands")
    decided = tuple([decode(command) for command in commands]) if commands else ()
    return Entry(data["now"], decode(data["event"]), decided)
