"""Paceline on Ray Core: workers are actors, payloads are flat arrays in the object store."""
