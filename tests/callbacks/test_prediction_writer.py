import json
import os
import resource
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from callbacks import Callback, PredictionWriter
from tests.numerics.running import on_processes
from trainer import Trainer, TrainModule


class Predicting(TrainModule):
    """Predicts several columns of several types, and texts."""

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        (x,) = batch
        return {
            "double": x * 2,
            "half": {"low": (x / 2).to(torch.bfloat16), "sign": x > 3},
            "row": x.repeat(1, 3).to(torch.int64)[:, :, None],
            "text": [f"é{value:g}" for value in x.flatten().tolist()],
            "array": numpy.broadcast_to(x.numpy().astype(numpy.int16), x.shape),  # read-only
        }


class Bare(TrainModule):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return batch[0] + dataloader_idx


class Texts(TrainModule):
    def predict_step(self, batch, batch_idx):
        return [f"{value:g}" for value in batch[0].flatten().tolist()]


def loader(samples, size, **options):
    return DataLoader(TensorDataset(torch.arange(float(samples))[:, None]), size, **options)


def make(*callbacks, **options):
    return Trainer(
        cpu=True, progress_bar=False, project_dir="run", callbacks=list(callbacks), **options
    )


def expected(samples):
    x = torch.arange(float(samples))[:, None]
    return {
        "double": x * 2,
        "half.low": (x / 2).to(torch.bfloat16),
        "half.sign": x > 3,
        "row": x.repeat(1, 3).to(torch.int64)[:, :, None],
        "array": x.to(torch.int16),
    }


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(samples, size, interval, module=Predicting):
    writer = PredictionWriter("out", write_interval=interval)
    returned = make(writer).predict(module(), loader(samples, size))
    return returned, [str(path.relative_to(Path.cwd())) for path in writer.directories]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("samples", "size"), [(7, 2), (2, 2)])
def test_merged_files_are_in_the_order_of_the_dataset(ranks, tmp_path, world, samples, size):
    for returned in on_processes(ranks, world, write, samples, size, "epoch"):
        assert returned == (None, ["out"])
    assert sorted(os.listdir("out")) == ["predictions.jsonl", "predictions.safetensors"]
    found = load_file("out/predictions.safetensors")
    assert found.keys() == expected(samples).keys()
    for name, tensor in expected(samples).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    texts = [{"text": f"é{value}"} for value in range(samples)]
    assert lines(tmp_path / "out/predictions.jsonl") == texts


@pytest.mark.parametrize("world", [1, 2])
def test_files_of_batches_are_numbered_as_in_the_loader(ranks, tmp_path, world):
    on_processes(ranks, world, write, 7, 2, "batch")
    stems = [f"batch-{number:08d}" for number in range(4)]
    files = [f"{stem}.{suffix}" for stem in stems for suffix in ("jsonl", "safetensors")]
    assert sorted(os.listdir("out")) == files
    found = [load_file(f"out/{stem}.safetensors") for stem in stems]
    for name, tensor in expected(7).items():
        assert torch.equal(torch.cat([each[name] for each in found]), tensor), name
    texts = [line["text"] for stem in stems for line in lines(tmp_path / f"out/{stem}.jsonl")]
    assert texts == [f"é{value}" for value in range(7)]


def test_a_file_of_a_batch_is_there_when_the_next_is_predicted():
    seen = []

    class Looking(Bare):
        def predict_step(self, batch, batch_idx):
            seen.append(sorted(os.listdir("out")))
            return batch[0]

    make(PredictionWriter("out", write_interval="batch")).predict(Looking(), loader(3, 1))
    assert seen == [[f"batch-{n:08d}.safetensors" for n in range(count)] for count in range(3)]


def test_a_bare_tensor_and_a_list_of_texts_are_columns_by_the_name_of_the_file(tmp_path):
    write(5, 2, "epoch", Bare)
    found = load_file("out/predictions.safetensors")
    assert {name: tensor.flatten().tolist() for name, tensor in found.items()} == {
        "predictions": [0, 1, 2, 3, 4]
    }
    assert os.listdir("out") == ["predictions.safetensors"]
    make(PredictionWriter("texts")).predict(Texts(), loader(3, 2))
    assert os.listdir("texts") == ["predictions.jsonl"]
    assert lines(tmp_path / "texts/predictions.jsonl") == [
        {"predictions": text} for text in ("0", "1", "2")
    ]


def test_tuples_are_columns_by_their_number_and_empty_batches_have_no_rows():
    class Found(TrainModule):  # boxes of an image: another number for each
        def predict_step(self, batch, batch_idx):
            x = batch[0]
            return x[x > 2], (x[x < 0].reshape(-1, 4), x)

    make(PredictionWriter("out")).predict(Found(), loader(6, 2))
    found = load_file("out/predictions.safetensors")
    assert found["0"].tolist() == [3, 4, 5]
    assert found["1.0"].shape == (0, 4)
    assert found["1.1"].flatten().tolist() == list(range(6))


def write_several():
    writer = PredictionWriter("out")
    make(writer).predict(Bare(), [loader(3, 2), loader(5, 2)])
    return [str(path.relative_to(Path.cwd())) for path in writer.directories]


@pytest.mark.parametrize("world", [1, 2])
def test_several_loaders_have_folders_of_their_own(ranks, world):
    folders = ["out/dataloader_idx_0", "out/dataloader_idx_1"]
    assert on_processes(ranks, world, write_several) == [folders] * world
    for index, (folder, samples) in enumerate(zip(folders, (3, 5), strict=True)):
        found = load_file(f"{folder}/predictions.safetensors")["predictions"]
        assert found.flatten().tolist() == [value + index for value in range(samples)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(7.0)[:, None])


def write_a_stream(limit):
    class Lone(Bare):
        def predict_step(self, batch, batch_idx):
            return batch

    trainer = make(PredictionWriter("out"), limit_predict_batches=limit)
    trainer.predict(Lone(), DataLoader(Stream(), batch_size=2))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("limit", "samples"), [(None, 7), (3, 6)])
def test_streams_and_limits(ranks, world, limit, samples):
    on_processes(ranks, world, write_a_stream, limit)
    found = load_file("out/predictions.safetensors")["predictions"]
    assert found.flatten().tolist() == list(range(samples))


def predict_and_return(choice, writing):
    class Counting(Callback):
        batches = 0

        def on_predict_batch_end(self, trainer, module, outputs, batch, batch_idx):
            assert outputs.flatten().tolist() == batch[0].flatten().tolist()
            self.batches += 1

    counting = Counting()
    trainer = make(counting, *([PredictionWriter()] if writing else []))
    returned = trainer.predict(Bare(), loader(5, 2), return_predictions=choice)
    if returned is not None:
        returned = [batch.flatten().tolist() for batch in returned]
    return returned, counting.batches, (trainer.project_dir / "predictions").exists()


@pytest.mark.parametrize(
    ("choice", "writing", "kept"),
    [(None, False, True), (None, True, False), (True, True, True), (False, False, False)],
)
def test_every_hook_sees_predictions_that_are_not_returned(ranks2, choice, writing, kept):
    whole = [[0, 1], [2, 3], [4]] if kept else None
    results = ranks2(predict_and_return, choice, writing)
    assert results == [(whole, 2, writing), (None, 1, writing)]


def test_predictions_that_are_not_returned_are_freed():
    class Watching(Callback):
        outputs, most = [], 0

        def on_predict_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.outputs.append(weakref.ref(outputs))
            self.most = max(self.most, sum(one() is not None for one in self.outputs))

    watching = Watching()
    make(PredictionWriter("out"), watching).predict(Bare(), loader(20, 2))
    assert len(watching.outputs) == 10
    assert watching.most == 1


def write_twice(overwrite):
    try:
        for samples in (9, 3):
            writer = PredictionWriter("out", overwrite=overwrite)
            make(writer).predict(Bare(), loader(samples, 2))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world", [1, 2])
def test_existing_predictions_need_overwrite(ranks, world):
    refused = on_processes(ranks, world, write_twice, False)
    assert all("out already has predictions" in text for text in refused)
    assert load_file("out/predictions.safetensors")["predictions"].shape == (9, 1)
    assert on_processes(ranks, world, write_twice, True) == [""] * world
    assert load_file("out/predictions.safetensors")["predictions"].shape == (3, 1)


def test_overwrite_removes_all_batch_files():
    write(9, 2, "batch", Bare)
    Path("out/mine.txt").touch()
    with pytest.raises(ValueError, match=r"batch-00000000\.safetensors.*overwrite=True"):
        write(3, 2, "batch", Bare)
    writer = PredictionWriter("out", write_interval="batch", overwrite=True)
    make(writer).predict(Bare(), loader(3, 2))
    assert sorted(os.listdir("out")) == [
        "batch-00000000.safetensors",
        "batch-00000001.safetensors",
        "mine.txt",
    ]


@pytest.mark.parametrize("interval", ["batch", "epoch"])
def test_a_prediction_that_fails_leaves_no_merged_file_and_no_parts(interval):
    class Failing(Bare):
        def predict_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise KeyError("third")
            return batch[0]

    writer = PredictionWriter("out", write_interval=interval)
    trainer = make(writer)
    with pytest.raises(KeyError, match="third"):
        trainer.predict(Failing(), loader(8, 2))
    kept = [f"batch-{n:08d}.safetensors" for n in range(2)] if interval == "batch" else []
    assert sorted(os.listdir("out")) == kept
    writer.overwrite = True
    trainer.predict(Bare(), loader(4, 2))  # the same writer again
    assert len(os.listdir("out")) == (2 if interval == "batch" else 1)


@pytest.mark.parametrize("interval", ["batch", "epoch"])
@pytest.mark.parametrize("module", [Bare, Texts])
def test_a_disk_that_refuses_leaves_nothing_but_whole_files(interval, module):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Full(Callback):
        def on_predict_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
            if batch_idx == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))

    trainer = make(Full(), PredictionWriter("out", write_interval=interval))
    try:
        with pytest.raises(OSError, match="File too large"):
            trainer.predict(module(), loader(5000, 1000))  # batches smaller than a file's buffer
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept = [f"batch-00000000.{'safetensors' if module is Bare else 'jsonl'}"]
    assert os.listdir("out") == (kept if interval == "batch" else [])


def test_a_merge_that_fails_leaves_no_parts():
    class Blocking(Bare):
        def predict_step(self, batch, batch_idx):
            os.makedirs("out/predictions.safetensors", exist_ok=True)
            return super().predict_step(batch, batch_idx)

    with pytest.raises(OSError, match=r"predictions\.safetensors"):
        make(PredictionWriter("out")).predict(Blocking(), loader(4, 2))
    assert os.listdir("out") == ["predictions.safetensors"]


def test_parts_of_a_process_that_died_are_swept():
    os.makedirs("out/.parts")
    with open("out/.parts/rank-00007.bin", "w") as file:
        file.write("left")
    Path("out/.batch-00000007.jsonl").touch()
    write(3, 2, "epoch", Bare)
    assert os.listdir("out") == ["predictions.safetensors"]


def test_a_trial_writes_nothing(tmp_path):
    writer = PredictionWriter(tmp_path / "out")
    make(writer, fast_dev_run=True).predict(Bare(), loader(4, 2))
    assert not (tmp_path / "out").exists()
    assert writer.directories == []


REFUSED = [
    (lambda x, n: {"a": x.sum()}, ValueError, "'a' .* has no sample dimension"),
    (lambda x, n: {"a": numpy.array(3.0)}, ValueError, "'a' .* has no sample dimension"),
    (lambda x, n: {"a": x, "b": 3}, TypeError, "'b' .* is 3 of type int"),
    (lambda x, n: None, TypeError, "'predictions' .* is None"),
    (lambda x, n: {"a": [object(), object()]}, TypeError, "'a' .* cannot be written as JSON"),
    (lambda x, n: {"a": ["x"], "b": ["x", "y"]}, ValueError, "'a': 1, 'b': 2"),
    (lambda x, n: {"a.b": x, "a": {"b": x}}, ValueError, "'a.b' .* occurs twice"),
    (lambda x, n: x.to(torch.complex128), TypeError, "complex128"),
    (lambda x, n: x.repeat(1, n + 1), ValueError, r"batch 1 .* \['predictions: .*\(2,\)'\], not"),
    (lambda x, n: x.to([torch.float32, torch.int8][n]), ValueError, "torch.int8"),
    (lambda x, n: [{"a": x}, {"b": x}][n], ValueError, r"are \['b: .*'\], not \['a: "),
    (lambda x, n: [["t"], x][n], ValueError, r"not \['predictions: a list'\]"),
]


@pytest.mark.parametrize(("function", "error", "text"), REFUSED)
def test_predictions_that_cannot_be_written_are_refused(function, error, text):
    class Wrong(TrainModule):
        def predict_step(self, batch, batch_idx):
            return function(batch[0], batch_idx)

    with pytest.raises(error, match=text):
        make(PredictionWriter("out")).predict(Wrong(), loader(4, 2))
    assert os.listdir("out") == []


def test_rows_of_several_shapes_go_into_files_of_their_own():
    class Ragged(TrainModule):
        def predict_step(self, batch, batch_idx):
            return batch[0].repeat(1, batch_idx + 1)

    write(4, 2, "batch", Ragged)
    shapes = [load_file(f"out/{name}")["predictions"].shape for name in sorted(os.listdir("out"))]
    assert shapes == [(2, 1), (2, 2)]


def write_differently(where):
    class Differing(TrainModule):
        def predict_step(self, batch, batch_idx):
            if where == "columns" and self.trainer.accelerator.process_index == 1:
                return batch[0].double()
            return batch[0]

    folder = "out"
    trainer = make(PredictionWriter(folder))
    if where == "disks":
        folder = f"disk-{trainer.accelerator.process_index}"
        trainer = make(PredictionWriter(folder))
    try:
        trainer.predict(Differing(), loader(4, 2))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("where", "text"), [("columns", "predictions of rank 1"), ("disks", "do not share the folder")]
)
def test_predictions_that_cannot_be_merged_are_an_error_on_all_ranks(ranks2, where, text):
    assert all(text in messages for messages in ranks2(write_differently, where, timeout=30))
