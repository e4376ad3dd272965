"""Data loading: reproducible sample order, sharding over processes, and resume inside an epoch.

The order of an epoch is a function of the seed and the epoch number. `sampling` decides which
batches an epoch has and which process gets each one. `seeding` makes random augmentation a function
of the batch's position in the epoch. `epoch_iterator` is the epoch iterator: it reads and shards.

The loaders that `Accelerator.prepare` returns are built on these. `loader` reads on every process.
`dispatch` reads on rank 0 and sends each process its part. `skip` resumes inside an epoch.
`prepare` chooses between them. `batches` splits and concatenates batches.
"""
