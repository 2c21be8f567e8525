"""Policies: which workers compute, how long a step waits, how stale a result may be."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
