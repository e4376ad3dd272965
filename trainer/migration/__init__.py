"""Moving in from Lightning, Accelerate and the Hugging Face Trainer.

``table`` lists the names that do not carry over, each with its replacement. The errors of
`trainer.lightning` (``refusals``; ``values`` for replacements that depend on an argument's value),
the findings of `trainer migrate` and the tables of ``docs/coming-from`` are made from it. The
errors of `trainer.Trainer` are made from the few names in `trainer.hints`.
"""
