"""No secret is in what a run writes, and none comes back as its mask."""

import json
import logging
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trackers import WandBTracker
from trainer import Accelerator, DataModule, Trainer, TrainModule
from trainer.cli.runs import read_runs
from trainer.hparams import make as make_from
from trainer.hparams import to_manifest

WORD = "pa55w0rd"
URL = f"postgres://me:{WORD}@host/data"


class Net(TrainModule):
    def __init__(self, width=1, api_key=None, data=None, options=None):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(1, width)

    def training_step(self, batch, batch_idx):
        logging.getLogger("trainer").warning("Reading %s again.", URL)
        if self.hparams.options["fails"]:
            raise OSError(f"no answer from {URL}")
        return self.net(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(DataModule):
    def __init__(self, hub_token):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(2, 1)), batch_size=1)


def make():
    return Net(2, WORD, URL, {"fails": False, "credentials": [WORD]})


def fit(module):
    trackers = ["csv", "tensorboard", WandBTracker("p", mode="offline")]
    arguments = {"max_epochs": 1, "cpu": True, "progress_bar": False, "project_dir": "run"}
    trainer = Trainer(log_with=trackers, **arguments)
    trainer.fit(module, datamodule=Data(WORD), ckpt_path="auto")
    return trainer


def written(folder="run"):
    return b"".join(path.read_bytes() for path in Path(folder).rglob("*") if path.is_file())


def test_no_file_of_a_run_holds_a_secret():
    trainer = fit(make())
    messages = json.loads(Path("run/run.json").read_text())
    assert messages["hyper_parameters"] == {
        "width": 2,
        "api_key": "***",
        "data": "postgres://me:***@host/data",
        "options": {"fails": False, "credentials": ["***"]},
        "hub_token": "***",
    }
    told, *others = [each["text"] for each in messages["warnings"]]
    assert told.startswith(
        "Checkpoints do not hold the secrets among the arguments of Net: api_key"
    )
    assert others[0] == "Reading postgres://me:***@host/data again."
    assert WORD.encode() not in written()
    assert trainer.module.hparams.api_key == WORD  # the run itself has it


def test_no_file_of_a_failed_run_holds_a_secret():
    module = make()
    module.hparams.options["fails"] = True
    with pytest.raises(OSError, match=WORD):
        fit(module)
    assert WORD.encode() not in written()


def test_an_accelerator_writes_no_secret():
    accelerator = Accelerator(log_with=["csv", "tensorboard"], project_dir="run", cpu=True)
    accelerator.init_trackers("own", config={"db": {"password": WORD}, "url": URL})
    accelerator.log({"note": URL, "hf_token": WORD, "loss": 1.0}, step=1)
    accelerator.log_text({"sample": URL}, step=1)
    accelerator.end_training()
    assert WORD.encode() not in written()
    assert "***" in Path("run/own/metrics.csv").read_text()


def test_a_module_is_not_made_with_the_mask_of_a_secret():
    fit(make())
    (path,) = Path("run/checkpoints").glob("step-*")
    with pytest.raises(TypeError) as error:
        Net.load_from_checkpoint(path)
    assert str(error.value) == (
        f"Net cannot be created: {path} does not hold its arguments api_key, data, options. "
        "Secrets, by their names, are not saved (api_key, data, options.credentials[0]). Pass "
        "load_from_checkpoint(…, api_key=…, data=…, options=…)."
    )
    given = {"api_key": None, "data": URL, "options": None}
    assert Net.load_from_checkpoint(path, **given).hparams == {"width": 2, **given}


class Keyed(TrainModule):
    def __init__(self, key="image", token="cls", command=()):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).mean()

    configure_optimizers = Net.configure_optimizers


def test_a_checkpoint_keeps_what_may_be_no_secret_and_pages_do_not_show_it(caplog):
    module = Keyed("pixels", "[CLS]", ["--key", "a", f"--password={WORD}", "--api-key", WORD, "-v"])
    fit(module)
    (path,) = Path("run/checkpoints").glob("step-*")
    assert "do not hold the secrets among the arguments of Keyed: command." in caplog.text
    with pytest.raises(TypeError, match=r"are not saved \(command\[2\], command\[4\]\). Pass"):
        Keyed.load_from_checkpoint(path)
    loaded = Keyed.load_from_checkpoint(path, command=())
    assert loaded.hparams == {"key": "pixels", "token": "[CLS]", "command": ()}
    saved = json.loads((path / "manifest.json").read_text())["hyper_parameters"]["arguments"]
    assert saved["command"] == ["--key", "a", "--password=***", "--api-key", "***", "-v"]
    (run,) = read_runs([Path("run")])
    shown = run.parameters("hyper_parameters")
    assert (shown["key"], shown["token"]) == ("***", "***")
    assert "pixels" not in Path("run/run.json").read_text()
    assert WORD.encode() not in written()


class Any(TrainModule):
    def __init__(self, **options):
        super().__init__()
        self.save_hyperparameters()


def test_secrets_are_asked_for_by_the_class_that_takes_them():
    saved = to_manifest(Any(width=2, api_key=WORD))
    with pytest.raises(TypeError, match=r"are not saved \(api_key\)"):
        make_from(Any, saved, {}, "there")
    assert make_from(Any, saved, {"api_key": WORD}, "there").hparams == {
        "width": 2,
        "api_key": WORD,
    }
    assert make_from(Data, saved, {"hub_token": "t"}, "there").hparams == {"hub_token": "t"}


def test_a_report_of_an_earlier_run_shows_no_secret():
    fit(make())
    path = Path("run/run.json")
    messages = json.loads(path.read_text())
    messages["hyper_parameters"]["api_key"] = WORD
    path.write_text(json.dumps(messages))
    (run,) = read_runs([Path("run")])
    assert run.parameters("hyper_parameters")["api_key"] == "***"
