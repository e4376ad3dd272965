"""The package itself: every name is there, and what differs from the methods of those names."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import trainer
from trainer import Accelerator, utils
from trainer.checkpoint.weights import save_model
from trainer.launch.configuration import LaunchConfiguration, read_file
from trainer.state import AcceleratorState, DistributedType, PartialState, is_initialized
from trainer.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    reduce,
    tqdm,
)


def test_every_name_is_there_and_known_to_type_checkers():
    assert [name for name in utils.__all__ if not hasattr(utils, name)] == []
    assert set(utils.__all__) <= set(dir(utils))
    stub = ast.parse(Path(utils.__file__).with_suffix(".pyi").read_text())
    typed = [(each.module, name.asname) for each in stub.body for name in each.names]
    table = [(module, name) for module, names in utils._NAMES.items() for name in names.split()]
    assert sorted(typed) == sorted(table)
    assert sorted(name for _, name in table) == utils.__all__  # none twice


def test_a_name_is_looked_up_on_first_use():
    code = "import sys, trainer.utils as u; assert 'trainer.cli' not in sys.modules; u.set_seed(1)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(trainer.__file__).parents[1])


@pytest.mark.parametrize("module", [trainer, utils])
def test_a_name_that_is_not_there(module):
    for name in ("nothing_at_all", "my_launcher"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(module, name)


def test_the_mean_is_the_default_of_the_function_and_not_of_the_method(ranks2):
    def body():
        accelerator = Accelerator(cpu=True)
        own = torch.tensor(float(accelerator.process_index + 1))
        results = [reduce(own), accelerator.reduce(own), reduce(own, "sum"), reduce(own, scale=2.0)]
        return [result.item() for result in results]

    assert ranks2(body) == [[1.5, 3.0, 3.0, 3.0]] * 2


def test_helpers_that_are_aliases(ranks2):
    def body():
        rank = Accelerator(cpu=True).process_index
        torch.manual_seed(rank)
        utils.synchronize_rng_state("torch")
        own = torch.Generator().manual_seed(rank)
        utils.synchronize_rng_state("generator", own)
        if rank == 1:
            Path("written").touch()
        utils.wait_for_everyone()
        seen = Path("written").exists()
        utils.wait_for_everyone()
        return torch.rand(2).tolist(), torch.rand(2, generator=own).tolist(), seen

    expected = torch.rand(2, generator=torch.Generator().manual_seed(0)).tolist()
    assert ranks2(body) == [(expected, expected, True)] * 2


def test_a_wrong_file_or_option_is_refused_by_every_process(tmp_path):
    Accelerator(cpu=True)
    for arguments, text in (
        ((1, None), "f is None; it must be a path or a file"),
        ((1, tmp_path / "f", "no"), "save_on_each_node is 'no'; it must be True or False"),
        ((1, tmp_path / "f", False, "no"), "safe_serialization is 'no'; it must be True or False"),
    ):
        with pytest.raises(TypeError, match=text):
            utils.save(*arguments)
    PartialState().__dict__.update(process_index=1, local_process_index=1)
    with pytest.raises(TypeError, match="f is None"):
        utils.save(1, None)
    assert not any(tmp_path.iterdir())


def test_tqdm_shows_one_bar_a_machine():
    def shown(**kwargs):
        stream = io.StringIO()
        assert list(tqdm(range(2), file=stream, **kwargs)) == [0, 1]
        return bool(stream.getvalue())

    assert shown()
    assert not shown(disable=True)
    PartialState().__dict__.update(local_process_index=1)
    assert not shown()
    assert not shown(disable=False)
    assert shown(main_process_only=False)


def test_a_basic_configuration_is_written_once(tmp_path, capsys):
    place = tmp_path / "new" / "mine.yaml"
    assert utils.write_basic_config("bf16", place) == place
    found = LaunchConfiguration(**read_file(place)[0])
    assert (found.mixed_precision, found.use_cpu) == ("bf16", not torch.accelerator.is_available())
    assert utils.write_basic_config(save_location=place) is False
    assert "was not changed" in capsys.readouterr().out
    assert LaunchConfiguration(**read_file(place)[0]).mixed_precision == "bf16"
    for arguments, said in (
        (("int8", tmp_path / "a.json"), "mixed_precision is 'int8'"),
        (("no", tmp_path / "a.txt"), "save_location is .*a.txt"),
    ):
        with pytest.raises(ValueError, match=said):
            utils.write_basic_config(*arguments)


def test_files_are_never_unpickled(tmp_path):
    utils.save({"a": torch.ones(2)}, tmp_path / "file")
    assert utils.load(tmp_path / "file", weights_only=True, mmap=True)["a"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="weights_only=False would unpickle"):
        utils.load(tmp_path / "file", weights_only=False)


def test_names_of_files_are_those_that_are_written(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for safe, name, index, stem, pattern in (
        (
            True,
            SAFE_WEIGHTS_NAME,
            SAFE_WEIGHTS_INDEX_NAME,
            utils.SAFE_MODEL_NAME,
            utils.SAFE_WEIGHTS_PATTERN_NAME,
        ),
        (
            False,
            WEIGHTS_NAME,
            WEIGHTS_INDEX_NAME,
            utils.MODEL_NAME,
            utils.WEIGHTS_PATTERN_NAME,
        ),
    ):
        save_model(model, tmp_path, safe_serialization=safe)
        assert (tmp_path / name).exists()
        save_model(model, tmp_path, 100, safe_serialization=safe)
        assert (tmp_path / index).exists()
        assert pattern.format(suffix="") == name == f"{stem}{Path(name).suffix}"
        assert list(tmp_path.glob(pattern.format(suffix="-00001-of-*")))
    assert utils.PROFILE_PATTERN_NAME.format(suffix=3) == "profile_3.json"


def test_the_state_module_has_what_scripts_import_from_it():
    assert not is_initialized()
    assert Accelerator(cpu=True).distributed_type is DistributedType.NO
    assert is_initialized()
    AcceleratorState._reset_state()
    assert not is_initialized()


def test_an_earlier_name_of_a_kind_of_processes_is_understood_with_a_warning():
    with pytest.warns(FutureWarning, match=r"TPU is the earlier name of DistributedType\.XLA"):
        assert DistributedType.TPU is DistributedType.XLA
    assert "TPU" not in DistributedType.list()
    assert str(DistributedType.NO) == f"{DistributedType.NO}" == "DistributedType.NO"
    assert DistributedType.NO == "NO"
