"""Moving in from Lightning, Accelerate and the Hugging Face Trainer.

``table`` is all that is known of their names: each that does not carry over, with what to use. From
it come the errors of `trainer.lightning` (``refusals``, with ``values`` for what depends on an
argument's value), the findings of `trainer migrate` and the tables of ``docs/migrating.md``. The
errors of `trainer.Trainer` come from the few names in `trainer.hints`.
"""
