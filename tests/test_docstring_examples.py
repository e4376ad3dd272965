"""Every public class and function has an example in its docstring, and the example runs.

An example is the code below a line ``Example::``. It may use what the script of a user has before
it: the public names, the usual imports, the variables of `SETUP` and a folder ``checkpoint``.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from enum import Enum
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

import callbacks
import trackers
import trainer

PACKAGES = (callbacks, trackers, trainer)
PUBLIC = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in PACKAGES
    for name in package.__all__
}
EXAMPLE = re.compile(r"^Example::\n\n((?: {4}.*\n|\n)+)", re.MULTILINE)

# Errors that name what this machine lacks, where an example asks the Trainer or the Accelerator for
# it. The arguments have been checked by then.
LACKING: dict[str, tuple[type[Exception], str]] = {
    "trainer.MegatronLMPlugin": (ValueError, "megatron-core trains on CUDA devices"),
    "trainer.ParallelismConfig": (ValueError, "product is 4; the number of processes is 1"),
    "trainer.TERecipeKwargs": (ImportError, "needs transformer_engine"),
    "trainer.TorchTensorParallelPlugin": (ValueError, "product is 2; the number of processes is 1"),
}


def needs_example(thing: Any) -> bool:
    """Whether a public name must have an example: errors and enumerations need none."""
    if inspect.isclass(thing):
        return not issubclass(thing, (BaseException, Enum))
    return inspect.isfunction(thing)


def example_of(thing: Any) -> str:
    """Return the code of the example in a docstring, empty if there is none."""
    match = EXAMPLE.search(inspect.cleandoc(thing.__doc__ or "") + "\n")
    return textwrap.dedent(match[1]).strip() if match else ""


# -- what the examples use -------------------------------------------------------------------------


class Classifier(trainer.TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU())
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.encoder(x))

    def training_step(self, batch, batch_idx):
        x, y = batch["labelled"] if isinstance(batch, dict) else batch
        loss = torch.nn.functional.cross_entropy(self(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", torch.nn.functional.cross_entropy(self(x), y))
        self.log("val/accuracy", (self(x).argmax(-1) == y).float().mean())

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test/accuracy", (self(x).argmax(-1) == y).float().mean())

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.01, momentum=0.9)


class Model(torch.nn.Sequential):
    def __init__(self, _: Any = None) -> None:
        super().__init__(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))


# The variables that an example may use without making them, and how they are made.
LOADER = "DataLoader(train_set, batch_size=8, shuffle=True)"
SETUP = {
    "accelerator": "Accelerator()",
    "config": "None",
    "decoder": "torch.nn.Linear(16, 10)",
    "encoder": "torch.nn.Linear(64, 16)",
    "inputs": "torch.randn(8, 64)",
    "labelled": LOADER,
    "model": "Model()",
    "module": "Classifier()",
    "optimizer": "torch.optim.AdamW(model.parameters())",
    "targets": "torch.randint(10, (8,))",
    "test_loader": LOADER,
    "train_loader": LOADER,
    "train_set": "TensorDataset(torch.randn(16, 64), torch.randint(10, (16,)))",
    "trainer": "Trainer(max_epochs=2)",
    "unlabelled": LOADER,
    "val_loader": LOADER,
    "val_set": "train_set",
}


def run(text: str, namespace: dict[str, Any], name: str = "example") -> None:
    """Run code, and before each statement what makes the variables of `SETUP` that it uses."""
    for statement in ast.parse(text).body:
        names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
        used = {each.id for each in names if isinstance(each.ctx, ast.Load)}
        for each in sorted(used & SETUP.keys() - namespace.keys()):
            run(f"{each} = {SETUP[each]}", namespace)
        exec(compile(ast.Module([statement], []), f"<{name}>", "exec"), namespace)


def run_example(name: str, text: str) -> dict[str, Any]:
    """Run an example in the working directory; return its variables."""
    namespace = {each.__name__: each for each in (Classifier, DataLoader, Model, TensorDataset)}
    namespace |= {"torch": torch, "__name__": "example"}
    for package in PACKAGES:
        namespace |= {each: getattr(package, each) for each in package.__all__}
    os.makedirs("checkpoint", exist_ok=True)
    save_file(Model().state_dict(), "checkpoint/model.safetensors")
    run(text, namespace, f"example of {name}")
    return namespace


# -- tests -----------------------------------------------------------------------------------------


def test_every_public_class_and_function_has_an_example():
    named = {name for name, thing in PUBLIC.items() if needs_example(thing)}
    assert named - {name for name in named if example_of(PUBLIC[name])} == set()


@pytest.mark.parametrize("name", [name for name, thing in PUBLIC.items() if example_of(thing)])
def test_the_example_runs(name, monkeypatch):
    if name.startswith("trackers.") and hasattr(PUBLIC[name], "requires_package"):
        # The constructor of a tracker stores its arguments, which needs no package.
        monkeypatch.setattr(PUBLIC[name], "requires_package", None)
    if name in LACKING:
        error, text = LACKING[name]
        with pytest.raises(error, match=text):
            run_example(name, example_of(PUBLIC[name]))
        return
    namespace = run_example(name, example_of(PUBLIC[name]))
    if name.startswith("callbacks.") and "module" not in namespace:  # no fit yet
        run("trainer.fit(module, train_loader, val_loader)", namespace)


def test_what_is_wrong_is_noticed():
    def broken():
        """Broken.

        Example::

            early_stopping = EarlyStopping(monitr="val/loss")

        Args:
            none: Not a part of the example.
        """

    assert needs_example(broken)
    assert example_of(broken).endswith('EarlyStopping(monitr="val/loss")')
    with pytest.raises(TypeError, match="monitr"):
        run_example("broken", example_of(broken))
    with pytest.raises(NameError, match="trainning"):
        run_example("broken", "trainning")
    assert example_of(run_example) == ""
