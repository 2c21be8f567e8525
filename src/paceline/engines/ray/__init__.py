"""Paceline on Ray Core: workers are actors, payloads are flat arrays in the object store."""

from paceline.core.extras import require_ray

require_ray()
