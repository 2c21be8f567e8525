"""Decentralized training: each node has a model and sends updates to its neighbors in a graph."""

from paceline.codecs.triggers import Always, Lag, OnChange
from paceline.gossip.graphs import (
    Graph,
    complete,
    exponential,
    hierarchical,
    random_regular,
    ring,
    torus,
)
from paceline.gossip.mixing import Averaging, Difference
from paceline.gossip.policy import Gossip
from paceline.gossip.triggers import EventGrad, EventGradStatic

__all__ = [
    "Always",
    "Averaging",
    "Difference",
    "EventGrad",
    "EventGradStatic",
    "Gossip",
    "Graph",
    "Lag",
    "OnChange",
    "complete",
    "exponential",
    "hierarchical",
    "random_regular",
    "ring",
    "torus",
]
