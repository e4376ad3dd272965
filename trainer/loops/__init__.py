"""The loops as plain functions over a `run.Run`: `fit`, `evaluate`, `predict`."""
