"""Trains one PyTorch model on machines that are unequal, unreliable and far apart."""

import lazy_loader

__version__ = "0.2.0"

# __init__.pyi lists the names. Each is imported at first use, so the command starts quickly.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
