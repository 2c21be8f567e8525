"""Settings of Ray for training on machines that fail; set them before `ray start`."""

from __future__ import annotations

HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "400",
    "RAY_health_check_timeout_ms": "1200",
    "RAY_health_check_failure_threshold": "3",
}
"""On the head: a machine counts as lost after five silent seconds, not after a minute."""

SETTINGS = {
    "RAY_AUTH_MODE": "token",  # only processes with the token can run code here
    "RAY_worker_niceness": "0",  # by default workers yield to everything else on the host
    **HEALTH,
}
"""On every machine of a cluster."""
