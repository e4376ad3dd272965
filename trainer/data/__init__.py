"""Data loading: reproducible sample order, sharding over processes, and resume inside an epoch.

The order of an epoch is a function of the seed and the epoch number. `sampler` decides which
batches an epoch has and which process gets each one. `seeding` makes random augmentation a function
of the batch's position in the epoch. `epoch_iterator` reads an epoch, sharded over the processes.

The loaders that `Accelerator.prepare` returns are built on these. `dataloader` reads on every
process. `dispatcher` reads on rank 0 and sends each process its part. `prepare` chooses between
them, and skips batches to resume inside an epoch. `batch` splits and concatenates batches.
"""
