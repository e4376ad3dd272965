"""The shape of accelerate's guide to large models: an empty model, filled from disk in parts."""

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils.modeling import compute_module_sizes, infer_auto_device_map
from safetensors.torch import save_file


def make():
    return torch.nn.Sequential(
        torch.nn.Linear(6, 6), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(6, 6))
    )


def main(folder):
    torch.manual_seed(0)
    model = make()
    save_file(model.state_dict(), f"{folder}/model.safetensors", {"format": "pt"})
    with init_empty_weights():
        empty = make()
    sizes = {name: int(size) for name, size in compute_module_sizes(empty).items()}
    inferred = infer_auto_device_map(empty, max_memory={"cpu": 400, "disk": 10_000})
    filled = load_checkpoint_and_dispatch(
        empty, folder, device_map={"0": "cpu", "1": "disk"}, offload_folder=f"{folder}/offloaded"
    )
    x = torch.randn(4, 6)
    with torch.no_grad():
        found = filled(x).tolist()
    remove_hook_from_submodules(filled)
    return {
        "meta": all(parameter.is_meta for parameter in make().to("meta").parameters()),
        "devices": {name: str(device) for name, device in inferred.items()},
        "sizes": sizes,
        "outputs": found,
        "expected": model(x).tolist(),
    }
