"""Use the members of `Accelerator` that Accelerate has too, on the digits.

The script uses only the documented API: with ``from accelerate import Accelerator`` and
``from accelerate.utils import …`` in place of the two imports below, it also runs with Accelerate
0.31. Run it as it is, or with ``torchrun --nproc-per-node 2 examples/every_member.py``.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainer import Accelerator
from trainer.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    find_executable_batch_size,
    gather_object,
    load_checkpoint_in_model,
    set_seed,
)


class Digits(torch.nn.Module):
    """A multilayer perceptron for images of 8 × 8 pixels."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )

    def forward(self, images):
        return self.layers(images)


class Progress:
    """The script's own state, for `register_for_checkpointing`."""

    def __init__(self):
        self.epochs = 0

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


def load_data():
    """Return the images, scaled to [0, 1], four fifths of them for training."""
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    return random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))


def make_accelerator(project_dir):
    return Accelerator(
        device_placement=True,
        mixed_precision="no",
        cpu=True,
        dataloader_config=DataLoaderConfiguration(even_batches=True, use_seedable_sampler=True),
        rng_types=["generator"],
        log_with="tensorboard",
        project_config=ProjectConfiguration(
            project_dir=str(project_dir), automatic_checkpoint_naming=True, total_limit=2
        ),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        step_scheduler_with_optimizer=True,
        kwargs_handlers=[AutocastKwargs(enabled=True), DistributedDataParallelKwargs()],
        dynamo_backend="no",
    )


def number_behind_an_earlier_run(accelerator):
    """Continue the numbering after the checkpoints that an earlier run left in this folder."""
    folder = Path(accelerator.project_dir) / "checkpoints"
    taken = [int(path.name.rpartition("_")[2]) for path in folder.glob("checkpoint_*")]
    accelerator.wait_for_everyone()  # every process has listed the folder before any saves
    if taken:
        accelerator.project_configuration.iteration = max(taken) + 1
        accelerator.print(f"earlier run     numbers continue from {max(taken) + 1}")


def show_processes(accelerator):
    """Identify the processes, run functions on some of them, and let one go first."""
    state = accelerator.state
    accelerator.print(f"device          {accelerator.device}")
    accelerator.print(f"processes       {accelerator.num_processes}")
    assert accelerator.use_distributed == (accelerator.num_processes > 1)
    assert str(accelerator.distributed_type).split(".")[-1] in ("NO", "MULTI_CPU")
    assert accelerator.mixed_precision == state.mixed_precision == "no"
    assert accelerator.is_last_process == (state.process_index == state.num_processes - 1)
    done = []
    accelerator.on_main_process(lambda: done.append("main"))()
    accelerator.on_local_main_process(lambda: done.append("local main"))()
    accelerator.on_last_process(lambda: done.append("last"))()
    accelerator.on_process(lambda: done.append("process 0"), process_index=0)()
    accelerator.on_local_process(lambda: done.append("local 0"), local_process_index=0)()
    expected = 4 * accelerator.is_main_process + accelerator.is_last_process
    assert len(done) == expected, done
    with accelerator.main_process_first():
        pass  # for example a download, which the others then find in the cache
    with accelerator.local_main_process_first():
        pass
    with accelerator.split_between_processes(["a", "b", "c"], apply_padding=True) as part:
        parts = gather_object(part)
    assert parts[:2] == ["a", "b"]
    accelerator.wait_for_everyone()


def show_collectives(accelerator):
    """Exchange tensors between processes."""
    index, count = accelerator.process_index, accelerator.num_processes
    own = torch.tensor([index], device=accelerator.device)
    assert accelerator.gather({"own": own})["own"].tolist() == list(range(count))
    assert accelerator.reduce(own, reduction="sum").item() == sum(range(count))
    longer = torch.ones(index + 1, device=accelerator.device)
    assert accelerator.pad_across_processes(longer, dim=0, pad_index=0).shape == (count,)
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def show_single_calls(accelerator, loader):
    """Prepare each kind of object on its own, use it, and release everything."""
    model = accelerator.prepare_model(Digits())
    frozen = accelerator.prepare_model(Digits(), evaluation_mode=True)
    assert accelerator.unwrap_model(frozen) is frozen
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = accelerator.prepare_scheduler(
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    )
    loader = accelerator.prepare_data_loader(loader)
    images, labels = next(iter(accelerator.deepspeed_ulysses_dl_adapter(loader, model)))
    assert not accelerator.verify_device_map(model)
    with accelerator.no_sync(model):  # two forward passes, one all-reduce in the second backward
        first, second = model(images).sum(), model(images).mean()
    accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    accelerator.unscale_gradients(optimizer)
    with accelerator.profile() as profiler:
        accelerator.clip_grad_value_(model.parameters(), 0.5)
    assert profiler.key_averages()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    with accelerator.join_uneven_inputs([model], even_batches=True):
        accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
    try:
        accelerator.lomo_backward(model(images).sum(), learning_rate=None)
    except ValueError as error:  # it needs a learning rate and a LOMO optimizer
        accelerator.print(f"lomo_backward   {type(error).__name__}")
    accelerator.clear()


@torch.no_grad()
def evaluate(accelerator, model, loader):
    """Return the share of correctly classified samples, each counted once."""
    model.eval()
    correct = []
    for images, labels in loader:
        # The second does nothing here: it splits long sequences where `cp_size` is above 1.
        with accelerator.autocast(), accelerator.maybe_context_parallel():
            predictions = model(images).argmax(-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct.append(predictions == labels)
    correct = torch.cat(correct)
    assert len(correct) == len(loader.dataset), (len(correct), len(loader.dataset))
    return correct.float().mean().item()


def train(accelerator, arguments, train_set, val_set):
    """Train, evaluate and save; return what `show_saving` checks."""

    @find_executable_batch_size(starting_batch_size=arguments.batch_size)
    def run(batch_size):
        accelerator.free_memory()
        set_seed(0)
        model = Digits()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999)
        loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
        model, optimizer, scheduler, loader, val_loader = accelerator.prepare(
            model, optimizer, scheduler, loader, DataLoader(val_set, batch_size=64)
        )
        progress = Progress()
        accelerator.register_for_checkpointing(progress)
        accelerator.init_trackers("digits", config={"batch_size": batch_size})
        step = 0
        for epoch in range(arguments.max_epochs):
            model.train()
            # The first epoch starts after two batches, as after an interruption.
            batches = accelerator.skip_first_batches(loader, 2) if epoch == 0 else loader
            for images, labels in batches:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.cross_entropy(model(images), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    if not accelerator.optimizer_step_was_skipped:
                        scheduler.step()
                    optimizer.zero_grad()
                step += accelerator.sync_gradients
            progress.epochs += 1
            accuracy = evaluate(accelerator, model, val_loader)
            accelerator.log({"loss": loss.item(), "accuracy": accuracy}, step=step)
            accelerator.save_state()
        return model, progress, accuracy, val_loader

    return run()


def show_saving(accelerator, model, progress, accuracy, val_loader, folder):
    """Check that the saved state and the saved weights can be restored."""
    hooks = [
        accelerator.register_save_state_pre_hook(lambda _models, _weights, _output_dir: None),
        accelerator.register_load_state_pre_hook(lambda _models, _input_dir: None),
    ]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    epochs, progress.epochs = progress.epochs, 0
    accelerator.load_state()  # the newest, since checkpoints are named automatically
    assert progress.epochs == epochs
    assert evaluate(accelerator, model, val_loader) == accuracy
    for hook in hooks:
        hook.remove()

    accelerator.save_model(model, str(folder / "model"), max_shard_size="20KB")
    accelerator.save(accelerator.get_state_dict(model), str(folder / "weights.pt"))
    accelerator.wait_for_everyone()
    plain = Digits()
    load_checkpoint_in_model(plain, str(folder / "model"), device_map={"": "cpu"})
    weights = accelerator.unwrap_model(model).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--project-dir", type=Path, default=Path("runs/every-member"))
    arguments = parser.parse_args()

    set_seed(0)
    accelerator = make_accelerator(arguments.project_dir)
    number_behind_an_earlier_run(accelerator)
    train_set, val_set = load_data()
    show_processes(accelerator)
    show_collectives(accelerator)
    show_single_calls(accelerator, DataLoader(train_set, batch_size=8))
    model, progress, accuracy, val_loader = train(accelerator, arguments, train_set, val_set)
    show_saving(accelerator, model, progress, accuracy, val_loader, arguments.project_dir)
    assert accelerator.is_main_process == (
        accelerator.get_tracker("tensorboard", unwrap=True) is not None
        and accelerator.is_main_process
    )
    accelerator.end_training()
    accelerator.print(f"accuracy        {accuracy:.4f}")


if __name__ == "__main__":
    main()
