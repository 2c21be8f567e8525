"""Learners: how workers compute a result, and how a step changes the model with it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
