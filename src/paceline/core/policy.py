"""The contract of a policy: everything that engines, trainer, planner and reports may ask of it.

A policy derives from `Policy` and defines `react`; every other member has a default.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from paceline.core.protocol import (
    Command,
    Event,
    Prices,
    Task,
    View,
    Want,
    Work,
    WorkerId,
)
from paceline.core.state import describe


@dataclass(frozen=True, slots=True)
class Findings:
    """A policy's report on its run, for summaries.

    waited: steps that waited for workers whose data were underrepresented.
    changes: each change of plan with its reason; None for a policy that never replans.
    """

    waited: int = 0
    changes: Sequence[str] | None = None


class Policy(ABC):
    """Decides which workers compute, how long to wait, and what to send.

    The fields of a policy are plain data: numbers, texts, lists, dictionaries. A checkpoint saves
    and restores them. A policy with other fields defines `state_dict()` and
    `load_state_dict(state)`. A subclass overrides a property by a class attribute, by a dataclass
    field with a default, or by a property.
    """

    @abstractmethod
    def react(self, view: View, event: Event) -> Iterator[Command]:
        """Yield commands; each takes effect on the view before the generator resumes.

        The commands depend only on the arguments and the policy's own fields.
        """

    @property
    def wants(self) -> frozenset[Want]:
        """The statistics that the engine attaches to its events."""
        return frozenset()

    # --- requirements ----------------------------------------------------------------------------

    def check(self, workers: Sequence[WorkerId], batch: int) -> None:
        """Raise ValueError if the policy cannot work with these workers and this batch."""
        return None

    def check_prices(self, prices: Prices, message_bytes: int) -> None:
        """Raise ValueError if the policy needs other prices."""
        return None

    def works(self) -> Sequence[Work]:
        """Return the known kinds of work that the policy assigns; the learner checks them.

        A policy that assigns parts of the batch returns work with parts.
        """
        return ()

    def may_redo(self, worker: WorkerId, task: Task) -> bool:
        """Return whether a worker can compute the samples of another worker's task."""
        return task.work.tiles is None

    def results_per_step(self, workers: int) -> int:
        """Return the expected number of results that a step averages."""
        return workers

    @property
    def decentralized(self) -> bool:
        """Whether every node runs this policy for itself, without a central coordinator."""
        return False

    @property
    def needs_exact_results(self) -> bool:
        """Whether a step decodes its results.

        Such results cannot be compressed, replaced by a robust mean, or skipped.
        """
        return False

    @property
    def acting(self) -> Policy:
        """The policy that decides now: this one, unless it hands over to others."""
        return self

    # --- placement -------------------------------------------------------------------------------

    @property
    def placement(self) -> object | None:
        """The `Placement` of its tasks; None: equal shares of data that every worker can read."""
        return None

    def placed(self, placement: object) -> Policy:
        """Return this policy with another placement."""
        raise ValueError(
            f"{describe(self)} sizes its tasks itself and takes no placement; leave placement= "
            "out, or use a policy such as sync, k_sync or bandit"
        )

    # --- identity and findings -------------------------------------------------------------------

    @property
    def innermost(self) -> Policy:
        """The policy inside all wrappers; for a policy that is no wrapper, the policy itself."""
        return self

    @property
    def plan(self) -> object | None:
        """The `Plan` that the policy carries out; None: it has no plan."""
        return None

    def findings(self) -> Findings:
        """Return the report on the run so far."""
        return Findings()


class Wrapper(Policy):
    """A policy around another policy, `inner`; methods that it does not override go to `inner`."""

    inner: Policy

    def react(self, view: View, event: Event) -> Iterator[Command]:
        yield from self.inner.react(view, event)

    @property
    def wants(self) -> frozenset[Want]:
        return self.inner.wants

    def check(self, workers: Sequence[WorkerId], batch: int) -> None:
        self.inner.check(workers, batch)

    def check_prices(self, prices: Prices, message_bytes: int) -> None:
        self.inner.check_prices(prices, message_bytes)

    def works(self) -> Sequence[Work]:
        return self.inner.works()

    def may_redo(self, worker: WorkerId, task: Task) -> bool:
        return self.inner.may_redo(worker, task)

    def results_per_step(self, workers: int) -> int:
        return self.inner.results_per_step(workers)

    @property
    def decentralized(self) -> bool:
        return self.inner.decentralized

    @property
    def needs_exact_results(self) -> bool:
        return self.inner.needs_exact_results

    @property
    def acting(self) -> Policy:
        return self.inner.acting

    @property
    def placement(self) -> object | None:
        return self.inner.placement

    def placed(self, placement: object) -> Self:
        changed = copy.copy(self)
        changed.inner = self.inner.placed(placement)
        return changed

    @property
    def innermost(self) -> Policy:
        return self.inner.innermost

    @property
    def plan(self) -> object | None:
        return self.inner.plan

    def findings(self) -> Findings:
        return self.inner.findings()
