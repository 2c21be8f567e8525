from . import trackers as trackers
from .lightning import lightning_learner as lightning_learner
from .transformers import transformers_learner as transformers_learner
