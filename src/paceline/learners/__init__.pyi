from . import robust as robust
from .arrays import LeastSquares as LeastSquares
from .arrays import Logistic as Logistic
from .arrays import Quadratic as Quadratic
from .arrays import TimingOnly as TimingOnly
from .outer import DelayedNesterov as DelayedNesterov
from .transforms import ClipNorm as ClipNorm
from .transforms import TrustRatio as TrustRatio
