"""Alike from the outside: a simulator, and Ray."""
