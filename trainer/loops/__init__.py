"""The training, evaluation and prediction loops, as functions of a `state.Run`; their set-up."""
