"""The errors that a user may want to catch."""

from __future__ import annotations

import signal
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class ClusterError(RuntimeError):
    """Joining a cluster failed; the message gives the reason and the remedy."""


class InsecureCluster(ClusterError):
    """Other machines can reach the cluster, so anyone who connects can run code on it."""


class NodesLost(RuntimeError):
    """In decentralized training some nodes did not start, or all nodes are lost."""


class PolicyError(Exception):
    """A policy yielded an invalid command, which is a bug in the policy."""


class ServersLost(RuntimeError):
    """The model cannot be recovered, or no process may take a server's place."""


class SlicesLost(ServersLost):
    """A slice of the model, or a result, is lost with all its copies.

    why: what is lost.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}. Resume from a checkpoint")
        self.why = why


class StalledError(RuntimeError):
    """Nothing runs, no timer is set, and the policy has not stopped."""


class Terminated(SystemExit):
    """SIGTERM ended the run. The process exits with code 143 (128 + 15) unless this is caught."""

    def __init__(self, run: Any) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.run = run  # a paceline.Run with the training so far


class WorkersLost(RuntimeError):
    """No worker is left, and no restarts are left."""


class WrongGradients(RuntimeError):
    """Workers that computed the same gradient returned different results."""
