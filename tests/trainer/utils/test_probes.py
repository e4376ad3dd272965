"""What scripts ask about packages, devices, versions and settings."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

import pytest
import torch

from trainer import utils
from trainer.utils import parse_flag_from_env, patch_environment, str_to_bool

PROBES = (
    "is_aim_available is_amdsmi_available is_boto3_available is_clearml_available "
    "is_comet_ml_available "
    "is_datasets_available is_deepspeed_available is_dvclive_available is_import_timer_available "
    "is_matplotlib_available is_mlflow_available is_msamp_available is_pandas_available "
    "is_peft_available is_pynvml_available is_pytest_available is_sagemaker_available "
    "is_schedulefree_available is_swanlab_available is_timm_available is_torchao_available "
    "is_torchdata_available is_torchvision_available is_trackio_available "
    "is_transformer_engine_available is_transformers_available is_triton_available "
    "is_wandb_available "
    "is_lomo_available is_bnb_available "
)
MODULES = {"lomo": "lomo_optim", "bnb": "bitsandbytes"}  # where the names differ


def test_packages_are_there_or_not(monkeypatch):
    for probe in PROBES.split():
        name = probe.removeprefix("is_").removesuffix("_available")
        installed = find_spec(MODULES.get(name, name)) is not None
        assert getattr(utils, probe)() == installed, probe
    assert utils.is_tensorboard_available() == any(
        find_spec(name) is not None for name in ("tensorboard", "tensorboardX")
    )
    assert utils.is_fp8_available() == any(
        find_spec(name) is not None for name in ("torchao", "transformer_engine")
    )
    assert utils.is_torchdata_stateful_dataloader_available() == utils.is_torchdata_available()
    assert not utils.is_rich_available()
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "1")
    assert utils.is_rich_available() == (find_spec("rich") is not None)


def test_a_package_may_be_asked_for_with_its_version(monkeypatch, tmp_path):
    probes = (utils.is_bnb_available, utils.is_4bit_bnb_available, utils.is_8bit_bnb_available)
    assert [each() for each in probes] == [find_spec("bitsandbytes") is not None] * 3
    (tmp_path / "bitsandbytes.py").write_text("features = {'multi_backend'}")
    (tmp_path / "bitsandbytes-0.38.0.dist-info").mkdir()
    (tmp_path / "bitsandbytes-0.38.0.dist-info" / "METADATA").write_text("Version: 0.38.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert [each() for each in probes] == [True, False, True]
    assert utils.is_bnb_available("0.38") > utils.is_bnb_available("0.39")
    assert utils.is_bitsandbytes_multi_backend_available()


def test_what_cannot_be_used_yet_is_not_there():
    for probe in (
        utils.is_npu_available,
        utils.is_mlu_available,
        utils.is_musa_available,
        utils.is_sdaa_available,
        utils.is_neuron_available,
    ):
        assert not probe(check_device=True)
    assert not utils.is_hpu_available(init_hccl=True)
    assert not utils.is_habana_gaudi1()
    assert not utils.is_torch_xla_available(check_is_tpu=True)
    assert not utils.is_megatron_lm_available()
    assert utils.is_transformer_engine_mxfp8_available() is False


def test_what_every_torch_has():
    assert utils.is_weights_only_available()
    assert utils.is_pippy_available()
    assert utils.is_fp16_available()
    assert utils.is_rocm_available() == (torch.version.hip is not None)
    assert utils.is_xccl_available() == torch.distributed.is_xccl_available()


def test_a_function_may_require_a_package():
    for required, name in (
        (utils.torchao_required, "torchao"),
        (utils.deepspeed_required, "deepspeed"),
    ):

        @required
        def add(a, b=1):
            return a + b

        if find_spec(name) is not None:
            assert add(1, b=2) == 3
        else:
            with pytest.raises(ImportError, match=f"add needs a package.*{name}"):
                add(1)


def test_devices_are_there_or_not():
    assert utils.is_cuda_available() == torch.cuda.is_available()
    assert utils.is_xpu_available() == torch.xpu.is_available()
    assert utils.is_mps_available() == torch.backends.mps.is_available()
    if not torch.cuda.is_available():
        assert utils.is_bf16_available()


@pytest.mark.parametrize(
    ("texts", "meant"),
    [(["1", "true", "YES", "on", "y", "t"], True), (["0", "false", "NO", "off", "n", "f"], False)],
)
def test_texts_of_flags(texts, meant):
    for text in texts:
        assert str_to_bool(text) == meant
        with patch_environment(a_flag=text):
            assert parse_flag_from_env("A_FLAG", not meant) is meant


def test_other_texts_of_variables():
    assert str_to_bool("yes", to_bool=True) is True
    assert str_to_bool("no", to_bool=True) is False
    with patch_environment(a_choice="x", a_number=3, negative=-1):
        assert utils.parse_choice_from_env("A_CHOICE") == "x"
        assert utils.get_int_from_env(["MISSING", "NEGATIVE", "A_NUMBER"], 5) == 3
    assert utils.parse_choice_from_env("A_CHOICE", "y") == "y"
    assert utils.get_int_from_env(["A_NUMBER"], 5) == 5
    assert utils.are_libraries_initialized("torch", "not_there") == ["torch"]
    lines = utils.convert_dict_to_env_variables({"A": "1", "B": "two words", "C": "x;y"})
    assert lines == ["A=1\n"]


def test_texts_that_are_no_flags():
    for text in ("", "maybe"):
        with pytest.raises(ValueError, match="must be a bool"):
            str_to_bool(text)
    assert parse_flag_from_env("A_FLAG") is False
    assert parse_flag_from_env("A_FLAG", True) is True


def test_versions_of_torch_compare_as_versions():
    numbers = torch.__version__.partition("+")[0]
    assert utils.is_torch_version("==", numbers)
    assert utils.is_torch_version(">=", "2.4")
    assert utils.is_torch_version(">", "2.9")  # 2.11 is later, though less as a text
    assert not utils.is_torch_version("<", numbers)
    assert utils.is_torch_version("<=", numbers)
    assert utils.is_torch_version("!=", "1.0")
    with pytest.raises(ValueError, match=r"operation is '~='; it must be one of >, >="):
        utils.is_torch_version("~=", "2.0")
    assert utils.compare_versions("numpy", ">=", "1.0")
    assert utils.compare_versions(torch.__version__, ">", "2.9")
    with pytest.raises(PackageNotFoundError):
        utils.compare_versions("not-there", ">=", "1.0")
