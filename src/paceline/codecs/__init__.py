"""Codecs: write vectors as shorter messages, and keep what is left out for the next message."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
