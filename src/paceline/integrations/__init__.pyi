from . import trackers as trackers
from .lightning import lightning_learner as lightning_learner
from .lightning_evaluation import lightning_evaluation as lightning_evaluation
from .transformers import transformers_learner as transformers_learner
