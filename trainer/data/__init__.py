"""Data: orders that are functions of seed and epoch, and loaders that share them out.

`sampling` decides which batches exist and who gets them, `seeding` makes random augmentation a
function of a batch's place in the epoch, `loader` reads and hands over.
"""
