"""Decisions without input or output: protocol, ledger, coordinator, journal."""
