"""Data: orders that are functions of seed and epoch, and loaders that share them out.

`sampling` decides which batches exist and who gets them, `seeding` makes random augmentation a
function of a batch's place in the epoch, `feed` reads and deals out. Upon that, what `Accelerator`
prepares: `loader` reads on every process, `dispatch` on rank 0 for all, `skip` goes on inside an
epoch, `prepare` chooses. `batches` cuts and joins batches.
"""
