"""Joins a Ray cluster or starts one, and checks it first."""
