"""Sessions: a user's own script joins a run, and keeps its loop."""

from paceline.core.extras import require_ray

require_ray()
