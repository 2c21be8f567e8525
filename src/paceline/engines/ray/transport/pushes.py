"""What a process has pushed or passed on, which may be lost on its way."""

from __future__ import annotations

from collections.abc import Collection

from paceline.engines.ray.transport.link import Address, Link

_RELAYED = 256  # objects passed on to one process that are remembered


class Pushes:
    """Remembers by address the keys of objects that are on their way, or have arrived."""

    def __init__(self) -> None:
        self._to: dict[Address, set[int]] = {}
        self._via: dict[Address, set[int]] = {}  # of these, by the process that passes them on
        self._relayed: dict[Address, dict[int, Link]] = {}  # passed on here, and who sent them

    def add(self, key: int, to: Address, via: Address) -> None:
        """Note an object for an address that goes through another process, or to the end itself."""
        self._to.setdefault(to, set()).add(key)
        if via != to:
            self._via.setdefault(via, set()).add(key)

    def has(self, key: int, to: Address | None) -> bool:
        return to is not None and key in self._to.get(to, ())

    def relay(self, key: int, to: Address, origin: Link) -> None:
        """Note an object of another process that is passed on."""
        relayed = self._relayed.setdefault(to, {})
        relayed[key] = origin
        if len(relayed) > _RELAYED:
            del relayed[min(relayed)]

    def lose(self, address: Address) -> tuple[set[int], dict[int, Link]]:
        """Forget all that went to a lost process, or through it. Return these keys, and by key the
        connections to those whose objects were passed on."""
        lost = self._to.pop(address, set()) | self._via.pop(address, set())
        return lost, self._relayed.pop(address, {})

    def drop(self, keys: Collection[int]) -> set[int]:
        """Forget objects; return the keys of those that were pushed, and may wait to be sent."""
        dropped = set()
        for pushed in (*self._to.values(), *self._via.values()):
            dropped |= pushed.intersection(keys)
            pushed.difference_update(keys)
        return dropped
