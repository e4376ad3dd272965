"""The models and data of Lightning's examples. WikiText-2 must be on disk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, random_split

from trainer.lightning.missing import getter
from trainer.lightning.pytorch.module import LightningDataModule, LightningModule

__all__ = [
    "BoringDataModule",
    "BoringModel",
    "DemoModel",
    "LightningLSTM",
    "LightningTransformer",
    "SequenceSampler",
    "SimpleLSTM",
    "Transformer",
    "WikiText2",
]

__getattr__ = getter(__name__)

_WORDS = 33278  # number of words in WikiText-2


class RandomDataset(Dataset[Tensor]):
    """A dataset of `length` normal random vectors of `size` numbers."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Any:
        """Return a vector."""
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(RandomDataset):
    """A dataset of dicts with a vector ``"a"``, and ``"b"`` equal to ``"a"`` plus 2."""

    def __getitem__(self, index: int) -> Any:
        """Return a dict."""
        return {"a": self.data[index], "b": self.data[index] + 2}


class RandomIterableDataset(IterableDataset[Tensor]):
    """A stream of `count` normal random vectors of `size` numbers."""

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.randn(self.size) for _ in range(self.count))


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """A stream that has a length."""

    def __len__(self) -> int:
        return self.count


class BoringModel(LightningModule):
    """One linear layer, trained towards ones on random vectors of 32 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Any:
        """Return two numbers for each vector."""
        return self.layer(x)

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the mean squared error, by default from ones."""
        return functional.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss as ``"x"``."""
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss as ``"y"``."""
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        """Return SGD and a schedule."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        """Return 64 random vectors, one per batch."""
        return DataLoader(RandomDataset(32, 64))

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class ManualOptimBoringModel(BoringModel):
    """`BoringModel` in manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Update the layer."""
        optimizer, loss = self.optimizers(), self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class DemoModel(LightningModule):
    """One linear layer, trained to have small outputs."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        """Return the ReLU of the layer's outputs."""
        return torch.relu(self.l1(x.flatten(1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the sum of the outputs."""
        return self(batch).sum()  # type: ignore[no-any-return]  # a module's call

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class BoringDataModule(LightningDataModule):
    """256 random vectors of 32 numbers, 64 for each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(32, 64 * 4)

    def _loader(self, part: int) -> DataLoader[Tensor]:
        return DataLoader(Subset(self.random_full, range(64 * part, 64 * (part + 1))))

    def train_dataloader(self) -> Any:
        """Return the first quarter."""
        return self._loader(0)

    def val_dataloader(self) -> Any:
        """Return the second quarter."""
        return self._loader(1)

    def test_dataloader(self) -> Any:
        """Return the third quarter."""
        return self._loader(2)

    def predict_dataloader(self) -> Any:
        """Return the last quarter."""
        return self._loader(3)


# -- language models -------------------------------------------------------------------------------


class WikiText2(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of pairs: `block_size` words of ``wikitext-2.txt``, and the word that follows each.

    Args:
        data_dir: The folder of the file.
        block_size: The number of words of a sample.
        download: Has no effect; nothing is downloaded.

    Raises:
        FileNotFoundError: The file does not exist.
    """

    def __init__(
        self, data_dir: str | Path = "./data", block_size: int = 35, download: bool = True
    ) -> None:
        self.path, self.block_size = Path(data_dir, "wikitext-2.txt"), block_size
        if not self.path.is_file():
            raise FileNotFoundError(
                f"{self.path} is missing, and WikiText2 downloads nothing here: put the text there "
                "(train.txt of word_language_model/data/wikitext-2 in pytorch/examples), or any "
                "other text."
            )
        numbers: dict[str, int] = {}
        lines = self.path.read_text(encoding="utf-8").splitlines()
        words = [word for line in lines for word in (*line.split(), "<eos>")]
        self.data = torch.tensor([numbers.setdefault(word, len(numbers)) for word in words])
        self.dictionary = numbers

    @property
    def vocab_size(self) -> int:
        """The number of different words."""
        return len(self.dictionary)

    def __len__(self) -> int:
        return len(self.data) // self.block_size - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the word indices of a sample, and the same shifted by one word."""
        start = index * self.block_size
        end = start + self.block_size
        return self.data[start:end], self.data[start + 1 : end + 1]


class _PositionalEncoding(nn.Module):
    """Adds sines and cosines. As in Lightning, all words get those of position ``x.size(1)``."""

    def __init__(self, dim: int, dropout: float, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        rates = torch.exp(torch.arange(0, dim, 2).float() * (-math.log(10000.0) / dim))
        angles = torch.arange(max_len).float().unsqueeze(1) * rates
        self.table = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[:, :dim]

    def forward(self, x: Tensor) -> Any:
        return self.dropout(x + self.table[x.size(1)].to(x.device))


class Transformer(nn.Module):
    """Torch's ``nn.Transformer`` between an embedding and a layer of word probabilities.

    Args:
        vocab_size: The number of different words.
        ninp: The size of an embedding.
        nhead: The number of attention heads.
        nhid: The size of the hidden layers.
        nlayers: The number of layers of the encoder, and of the decoder.
        dropout: The dropout probability.
    """

    def __init__(
        self,
        vocab_size: int = _WORDS,
        ninp: int = 200,
        nhead: int = 2,
        nhid: int = 200,
        nlayers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.ninp, self.vocab_size = ninp, vocab_size
        self.pos_encoder = _PositionalEncoding(ninp, dropout)
        self.embedding = nn.Embedding(vocab_size, ninp)
        self.transformer = nn.Transformer(
            ninp, nhead, nlayers, nlayers, nhid, dropout, batch_first=True
        )
        self.decoder = nn.Linear(ninp, vocab_size)

    def forward(self, inputs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return log-probabilities of shape (samples x words, `vocab_size`)."""
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(
                inputs.size(1), device=inputs.device
            )
        source, wanted = (
            self.pos_encoder(self.embedding(each) * math.sqrt(self.ninp))
            for each in (inputs, target)
        )
        logits = self.decoder(self.transformer(source, wanted, tgt_mask=mask))
        return functional.log_softmax(logits, dim=-1).view(-1, self.vocab_size)


class LightningTransformer(LightningModule):
    """Trains a `Transformer` on `WikiText2`."""

    def __init__(self, vocab_size: int = _WORDS) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size)

    def forward(self, inputs: Tensor, target: Tensor) -> Any:
        """See `Transformer.forward`."""
        return self.model(inputs, target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the negative log-likelihood of the correct words."""
        inputs, target = batch
        return functional.nll_loss(self(inputs, target), target.view(-1))

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        """Return `WikiText2`, with one sample per batch."""
        return DataLoader(WikiText2())


class SimpleLSTM(nn.Module):
    """An LSTM between an embedding and a layer of word probabilities; see `Transformer`."""

    def __init__(
        self,
        vocab_size: int = _WORDS,
        ninp: int = 512,
        nhid: int = 512,
        nlayers: int = 4,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.vocab_size, self.nhid, self.nlayers = vocab_size, nhid, nlayers
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocab_size, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(nhid, vocab_size)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, input: Tensor, hidden: Any) -> Any:  # noqa: A002 - Lightning's name
        """Return the log-probabilities and the hidden state."""
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        logits = self.decoder(self.drop(output)).view(-1, self.vocab_size)
        return functional.log_softmax(logits, dim=1), hidden

    def init_hidden(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return a hidden state of zeros."""
        zeros = next(self.parameters()).new_zeros(self.nlayers, batch_size, self.nhid)
        return zeros, zeros.clone()


class SequenceSampler(Sampler[list[int]]):
    """Yields batches in which each sample continues that of the previous batch."""

    def __init__(self, dataset: Sized, batch_size: int) -> None:
        super().__init__()
        self.dataset, self.batch_size = dataset, batch_size
        self.chunk_size = len(dataset) // batch_size

    def __iter__(self) -> Iterator[list[int]]:
        end = self.chunk_size * self.batch_size
        return (list(range(first, end, self.chunk_size)) for first in range(self.chunk_size))

    def __len__(self) -> int:
        return self.chunk_size


class LightningLSTM(LightningModule):
    """Trains a `SimpleLSTM` on `WikiText2`; its state is kept from batch to batch."""

    def __init__(self, vocab_size: int = _WORDS) -> None:
        super().__init__()
        self.model = SimpleLSTM(vocab_size=vocab_size)
        self.hidden: tuple[Tensor, Tensor] | None = None

    def on_train_epoch_end(self) -> None:
        """Reset the state."""
        self.hidden = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the negative log-likelihood of the correct words."""
        inputs, target = batch
        hidden = self.hidden or self.model.init_hidden(inputs.size(0))
        output, self.hidden = self.model(inputs, tuple(each.detach() for each in hidden))
        loss = functional.nll_loss(output, target.view(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=20.0)

    def train_dataloader(self) -> Any:
        """Return `WikiText2` in 20 sequences."""
        dataset = WikiText2()
        return DataLoader(dataset, batch_sampler=SequenceSampler(dataset, batch_size=20))


# -- images ----------------------------------------------------------------------------------------


def MNIST(*args: Any, **kwargs: Any) -> Any:
    """Return ``torchvision.datasets.MNIST``."""
    from torchvision import datasets  # type: ignore[import-not-found]  # optional

    return datasets.MNIST(*args, **kwargs)


class MNISTDataModule(LightningDataModule):
    """MNIST, with some of the training images kept for validation.

    Args:
        data_dir: The folder of its files.
        val_split: The number of images kept for validation.
        num_workers: Worker processes of each loader.
        normalize: Whether to normalise pixels to mean 0 and standard deviation 1.
        seed: Has no effect, as in Lightning; the split is always the same.
        batch_size: Images of a batch.
    """

    name = "mnist"
    num_classes = 10

    def __init__(
        self,
        data_dir: str = "./data",
        val_split: int = 5000,
        num_workers: int = 16,
        normalize: bool = False,
        seed: int = 42,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.data_dir, self.val_split, self.seed = data_dir, val_split, seed
        self.num_workers, self.normalize, self.batch_size = num_workers, normalize, batch_size

    def prepare_data(self) -> None:
        """Download missing files with torchvision."""
        MNIST(self.data_dir, train=True, download=True)
        MNIST(self.data_dir, train=False, download=True)

    def setup(self, stage: str) -> None:
        """Split the training images."""
        images = MNIST(self.data_dir, train=True, transform=self.default_transforms)
        sizes = [len(images) - self.val_split, self.val_split]
        generator = torch.Generator().manual_seed(42)
        self.dataset_train, self.dataset_val = random_split(images, sizes, generator)

    def _loader(self, dataset: Any, *, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            drop_last=True,
            pin_memory=True,
        )

    def train_dataloader(self) -> Any:
        """Return the training images, shuffled."""
        return self._loader(self.dataset_train, shuffle=True)

    def val_dataloader(self) -> Any:
        """Return the images kept for validation."""
        return self._loader(self.dataset_val)

    def test_dataloader(self) -> Any:
        """Return the test images."""
        return self._loader(MNIST(self.data_dir, train=False, transform=self.default_transforms))

    @property
    def default_transforms(self) -> Any:
        """The transforms that convert an image to a tensor."""
        from torchvision import transforms

        steps = [transforms.ToTensor()]
        steps += [transforms.Normalize(mean=(0.5,), std=(0.5,))] if self.normalize else []
        return transforms.Compose(steps)
