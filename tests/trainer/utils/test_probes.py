"""What scripts ask about packages, devices, versions and settings."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from trainer import utils
from trainer.utils import parse_flag_from_env, patch_environment, str_to_bool


def test_packages_are_there_or_not():
    assert utils.is_tensorboard_available() == (
        find_spec("tensorboard") is not None or find_spec("tensorboardX") is not None
    )
    assert utils.is_wandb_available() == (find_spec("wandb") is not None)
    assert utils.is_comet_ml_available() == (find_spec("comet_ml") is not None)
    assert utils.is_deepspeed_available() == (find_spec("deepspeed") is not None)


def test_what_cannot_be_used_yet_is_not_there():
    assert not utils.is_npu_available(check_device=True)
    assert not utils.is_torch_xla_available(check_is_tpu=True)


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
