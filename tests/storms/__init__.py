"""Whole runs in bad weather: real engines on simulated processes, and what must hold of them."""
