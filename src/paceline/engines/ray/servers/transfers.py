"""Questions to many workers at once, and timed transfers between their nodes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from math import isnan
from typing import Any, TypeVar

from paceline.engines.ray.calls import Calls
from paceline.engines.ray.pool import Pool
from paceline.engines.ray.servers.events import Way

Key = TypeVar("Key", bound=Hashable)


class Transfers:
    """Times transfers between nodes: a worker on one node fetches an object that a worker on the
    other makes. It ends within three times its timeout, even after losses."""

    def __init__(self, workers: Pool, calls: Calls) -> None:
        self._workers, self._calls = workers, calls
        self.running = False

    def start(
        self,
        ways: Sequence[Way],
        size: int,
        timeout: float,
        then: Callable[[Mapping[Way, float]], None],
    ) -> None:
        """Call `then` with the seconds of each way, `inf` for more than the timeout.

        Ways without an answer are left out. One probe runs at a time, and a second is ignored.
        """
        if self.running:
            return
        self.running = True
        up = {m.place.node: m.actor for m in self._workers.members.values() if m.joined and m.place}
        refs: dict[str, Any] = {}
        ready = {}
        for node in dict.fromkeys(source for end, source in ways if end in up and source in up):
            ready[node], refs[node] = up[node].sample.options(num_returns=2).remote(size)

        def fetch(made: Mapping[str, Any]) -> None:
            asked = {node: [w for w in ways if w[0] == node and w[1] in made] for node in up}
            calls = {
                node: up[node].fetch.remote([refs[source] for _, source in mine], timeout)
                for node, mine in asked.items()
                if mine
            }
            ask_all(self._calls, calls, 2 * timeout, partial(fetched, asked))

        def fetched(asked: Mapping[str, list[Way]], answers: Mapping[str, Any]) -> None:
            self.running = False
            pairs = [p for node, a in answers.items() for p in zip(asked[node], a, strict=True)]
            then({way: seconds for way, seconds in pairs if not isnan(seconds)})

        ask_all(self._calls, ready, timeout, fetch)


def ask_all(
    calls: Calls,
    asked: Mapping[Key, Any],
    timeout: float,
    then: Callable[[dict[Key, Any]], None],
) -> None:
    """Call `then` with the answers, once each call has ended or the timeout has passed."""
    answers: dict[Key, Any] = {}
    left = set(asked)

    def end(key: Key) -> None:
        left.discard(key)
        if not left:
            then(answers)

    def answered(key: Key, future: Future[Any]) -> None:
        if future.exception(timeout=0) is None:
            answers[key] = future.result(timeout=0)
        end(key)

    for key, ref in asked.items():
        calls.add(ref, timeout, partial(answered, key), partial(end, key))
    if not asked:
        then(answers)
