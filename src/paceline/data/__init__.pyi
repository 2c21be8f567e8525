from . import partition as partition
from . import shards as shards
