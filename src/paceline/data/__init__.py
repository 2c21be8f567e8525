"""Datasets that are already on this machine, read without downloading anything."""
