"""How long workers take to respond: models of the seconds that one task lasts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
