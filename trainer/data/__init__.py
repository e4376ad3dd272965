"""Data: orders that are functions of seed and epoch, and loaders that shard them.

`sampling` decides which batches exist and which process gets them, `seeding` makes random
augmentation a function of a batch's place in the epoch, `feed` reads and shards. On top of these
are the loaders that `Accelerator` prepares: `loader` reads on every process, `dispatch` on rank 0
for all, `skip` resumes inside an epoch, `prepare` chooses. `batches` cuts and joins batches.
"""
