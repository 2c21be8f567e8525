"""The decision logic, without I/O: protocol, ledger, coordinator, journal."""

from paceline.core import errors as errors
