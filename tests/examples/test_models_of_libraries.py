"""Models of other libraries in a `Trainer`: trained, published and exported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, PyTorchModelHubMixin
from torch import nn
from torch.utils.data import DataLoader

from trainer import Trainer, TrainModule


class Line(TrainModule, PyTorchModelHubMixin):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = nn.Linear(width, 1)

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(module: Any, data: Any) -> Any:
    Trainer(cpu=True, max_epochs=1, seed=0, progress_bar=False).fit(module, DataLoader(data, 4))
    return module


def test_a_module_is_pushed_to_the_hub_and_loaded_from_there(monkeypatch, tmp_path):
    hub = tmp_path / "hub"

    def upload(self: Any, *, folder_path: Any, **options: Any) -> Any:
        shutil.copytree(folder_path, hub)

    # The hub itself, which is not reached from here.
    monkeypatch.setattr(
        HfApi, "create_repo", lambda *_, repo_id, **__: type("Url", (), {"repo_id": repo_id})
    )
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    line = trained(Line(width=3), torch.randn(8, 3))
    line.push_to_hub("me/line")
    again = Line.from_pretrained(hub)
    torch.testing.assert_close(again.state_dict(), line.state_dict(), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # of torch's own
def test_a_trained_module_is_exported_to_onnx():
    pytest.importorskip("onnxscript", reason="needs onnxscript: pip install onnx onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    line, rows = trained(Line(), torch.randn(8, 4)), torch.randn(5, 4)
    shapes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(line.eval(), (rows[:3],), "line.onnx", dynamo=True, dynamic_shapes=shapes)
    session = runtime.InferenceSession("line.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: rows.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), line(rows).detach())


def test_a_unet_of_diffusers_trains_and_is_loaded_again():
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1}

    class Denoiser(Line):
        def __init__(self) -> None:
            super().__init__()
            self.net = diffusers.UNet2DModel(
                **sizes, **blocks, block_out_channels=(8, 8), norm_num_groups=4
            )
            self.noise = diffusers.DDPMScheduler(num_train_timesteps=10)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            noise, steps = torch.randn_like(batch), torch.randint(0, 10, (len(batch),))
            noisy = self.noise.add_noise(batch, noise, steps)
            return nn.functional.mse_loss(self.net(noisy, steps).sample, noise)

    net = trained(Denoiser(), torch.randn(8, 1, 8, 8)).net
    net.save_pretrained("unet")
    again = diffusers.UNet2DModel.from_pretrained("unet").state_dict()
    torch.testing.assert_close(again, net.state_dict(), rtol=0, atol=0)
    assert Path("unet", "config.json").exists()
