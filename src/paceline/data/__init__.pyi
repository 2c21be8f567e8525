from . import partition as partition
