"""The shape of the graph network tutorial: one graph is the batch, and masks divide its nodes."""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader


class GCNLayer(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.projection = nn.Linear(c_in, c_out)

    def forward(self, node_feats, adj_matrix):
        return adj_matrix @ self.projection(node_feats) / adj_matrix.sum(-1, keepdim=True)


class NodeLevelGNN(L.LightningModule):
    def __init__(self, **model_kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.first = GCNLayer(model_kwargs["c_in"], model_kwargs["c_hidden"])
        self.second = GCNLayer(model_kwargs["c_hidden"], 2)
        self.loss_module = nn.CrossEntropyLoss()

    def forward(self, data, mode="train"):
        x = self.second(torch.relu(self.first(data["x"], data["adj"])), data["adj"])
        mask = data[f"{mode}_mask"]
        loss = self.loss_module(x[mask], data["y"][mask])
        acc = (x[mask].argmax(dim=-1) == data["y"][mask]).sum().float() / mask.sum()
        return loss, acc

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-3)

    def training_step(self, batch, batch_idx):
        loss, acc = self.forward(batch, mode="train")
        self.log("train_loss", loss, batch_size=1)
        self.log("train_acc", acc, batch_size=1)
        return loss

    def validation_step(self, batch, batch_idx):
        _, acc = self.forward(batch, mode="val")
        self.log("val_acc", acc, batch_size=1)

    def test_step(self, batch, batch_idx):
        _, acc = self.forward(batch, mode="test")
        self.log("test_acc", acc, batch_size=1)


def graph(nodes=30):
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(nodes) % 2
    same = y[:, None] == y[None, :]
    adj = torch.rand(nodes, nodes, generator=draw) < torch.where(same, 0.4, 0.1)
    adj = (adj | adj.T | torch.eye(nodes, dtype=torch.bool)).float()
    x = torch.randn(nodes, 4, generator=draw) + y[:, None]
    part = torch.arange(nodes) % 3
    masks = {f"{name}_mask": part == i for i, name in enumerate(("train", "val", "test"))}
    return {"x": x, "adj": adj, "y": y, **masks}


def main(folder):
    L.seed_everything(42)
    loader = DataLoader([graph()], batch_size=None)
    trainer = L.Trainer(
        default_root_dir=folder,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(save_weights_only=True, mode="max", monitor="val_acc")],
        accelerator="auto",
        devices=1,
        max_epochs=6,
        enable_progress_bar=False,
    )
    model = NodeLevelGNN(c_in=4, c_hidden=8)
    trainer.fit(model, loader, loader)
    best = NodeLevelGNN.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    [tested] = trainer.test(best, loader, verbose=False)
    batch = next(iter(loader))
    _, train_acc = best(batch, mode="train")
    return model, {"test": tested, "train": train_acc.item()}
