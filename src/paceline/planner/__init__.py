"""Plans a run before it starts, by simulating policies on profiled workers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
