"""Trackers and metrics that people already use, as callbacks of a trainer."""
