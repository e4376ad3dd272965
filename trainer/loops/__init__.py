"""The training, evaluation and prediction loops, as functions of a `run.Run`; and their set-up."""
