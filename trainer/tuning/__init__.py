"""Find a learning rate and a batch size by short trials that leave no trace."""

from trainer.tuning.batch_size import BatchSizeSearch
from trainer.tuning.learning_rate import LearningRateTest
from trainer.tuning.tuner import Tuner

__all__ = ["BatchSizeSearch", "LearningRateTest", "Tuner"]
