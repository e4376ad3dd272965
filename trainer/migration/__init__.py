"""Migration from Lightning, Accelerate and the Hugging Face Trainer.

``table`` lists the names that do not exist here, with their replacements. The errors of
`trainer.lightning` (``refusals``; ``values`` for replacements that depend on an argument's value),
the findings of `trainer migrate` and the tables of ``docs/coming-from`` are generated from it. The
errors of `trainer.Trainer` use the smaller list in `trainer.hints`.
"""
