"""What large batches need: optimizers, learning rates and metrics. Works with and without `torchring.wrap`.

layerwise.py       LARS and LAMB
learning_rate.py   scale_lr, warm_up
mean_metric.py     MeanMetric
"""

from torchring.recipes.layerwise import LAMB, LARS
from torchring.recipes.learning_rate import WarmUp, scale_lr, warm_up
from torchring.recipes.mean_metric import MeanMetric

__all__ = ["LAMB", "LARS", "MeanMetric", "WarmUp", "scale_lr", "warm_up"]
