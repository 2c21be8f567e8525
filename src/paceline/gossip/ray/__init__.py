"""Decentralized training on Ray: a node in each actor, and a driver that collects journals."""
