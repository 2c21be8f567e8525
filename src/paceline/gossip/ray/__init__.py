"""Decentralized training on Ray: a node in each actor, and a driver that collects journals."""

from paceline.core.extras import require_ray

require_ray()
