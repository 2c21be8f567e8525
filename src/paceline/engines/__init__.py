"""Engines with one interface: a simulator, and Ray."""
