"""Models of other libraries in a `Trainer`: trained, published and exported."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, PyTorchModelHubMixin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.requires import NO_TIMM
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


class OfTimm(TrainModule):
    def __init__(self) -> None:
        import timm
        from timm.utils import ModelEmaV3

        super().__init__()
        self.model = timm.create_model("test_resnet", num_classes=3)
        self.ema = ModelEmaV3(self.model, decay=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def on_train_step_end(self) -> None:
        self.ema.update(self.model)

    def configure_optimizers(self) -> Any:
        from timm.optim import create_optimizer_v2
        from timm.scheduler import CosineLRScheduler

        optimizer = create_optimizer_v2(self.model, "adamw", lr=0.01)
        schedule = CosineLRScheduler(optimizer, t_initial=6, t_in_epochs=False, warmup_t=2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def test_a_model_of_timm_its_average_and_its_schedule_train_as_in_a_plain_loop(tmp_path):
    pytest.importorskip("timm", reason=NO_TIMM, exc_type=ImportError)
    data = TensorDataset(torch.randn(8, 3, 32, 32), torch.arange(8) % 3)
    torch.manual_seed(0)
    plain = OfTimm().train()
    begin = copy.deepcopy(plain.state_dict())
    made = plain.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for number, batch in enumerate([*DataLoader(data, 4)] * 3):
        plain.training_step(batch, number).backward()
        optimizer.step()
        schedule.step_update(number + 1)
        optimizer.zero_grad()
        plain.on_train_step_end()

    for epochs in (1, 3):  # the second start resumes
        module = OfTimm()
        module.load_state_dict(begin)
        trainer = Trainer(
            cpu=True, max_epochs=epochs, progress_bar=False, project_dir=tmp_path / "run"
        )
        trainer.fit(module, DataLoader(data, 4), ckpt_path="auto")
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=0, atol=0)
