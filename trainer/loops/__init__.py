"""The training, evaluation and prediction loops (functions of a `state.Run`), and their set-up."""
