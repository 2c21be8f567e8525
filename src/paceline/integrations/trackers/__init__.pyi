from .mlflow import MLflow as MLflow
from .prometheus import Prometheus as Prometheus
from .tensorboard import TensorBoard as TensorBoard
from .wandb import WandB as WandB
