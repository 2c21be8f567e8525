"""Popular experiment trackers and metrics systems, as callbacks of a trainer."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
