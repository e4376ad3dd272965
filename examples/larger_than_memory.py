"""Run a model that is larger than the memory it may use, from the disk, and compare its outputs.

A checkpoint of random weights is written layer by layer, so that there is never a whole model in
memory. Then the model is made without weights and loaded: as many layers as ``--memory`` allows
stay in memory, the others are read from the disk while they compute. On a machine with an
accelerator leave out ``max_memory``: it is filled first.
"""

import argparse
import json
import resource
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from trainer import init_empty_weights, load_checkpoint_and_dispatch, set_seed

WIDTH = 1024


class Layer(nn.Module):
    """A perceptron with a residual connection: kept whole, wherever it is."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


@torch.no_grad()
def write_checkpoint(folder, depth, x):
    """Write a checkpoint, one file for each layer, and return the outputs for an input."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {}
    for number in range(depth):
        layer, file = Layer(), f"layer-{number}.safetensors"
        x = layer(x)
        weights = {f"{number}.{name}": value for name, value in layer.state_dict().items()}
        save_file(weights, folder / file)
        places.update(dict.fromkeys(weights, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return x


def peak_memory():
    """Return the largest memory that this process has had, in MB."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=24, help="layers, of 17 MB each")
    parser.add_argument("--memory", type=int, default=100, help="MB for the weights")
    parser.add_argument("--folder", type=Path, default=Path("runs/larger-than-memory"))
    arguments = parser.parse_args()

    set_seed(0)
    x = torch.randn(4, WIDTH)
    expected = write_checkpoint(arguments.folder / "checkpoint", arguments.depth, x)

    before = peak_memory()
    with init_empty_weights():
        model = nn.Sequential(*(Layer() for _ in range(arguments.depth)))
    size = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
    model = load_checkpoint_and_dispatch(
        model,
        arguments.folder / "checkpoint",
        device_map="auto",
        max_memory={"cpu": f"{arguments.memory}MB"},
        no_split_module_classes=["Layer"],
        offload_folder=arguments.folder / "offload",
    )
    with torch.no_grad():
        outputs = model(x)
    places = list(model.hf_device_map.values())
    print(f"{places.count('cpu')} layers in memory, {places.count('disk')} on disk")
    print(f"{size:.0f} MB of weights, peak memory {peak_memory() - before:.0f} MB more than before")
    print("outputs equal:", torch.equal(outputs, expected))


if __name__ == "__main__":
    main()
